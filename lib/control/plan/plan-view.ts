/** What a reload would change: the answer of `POST /v1/plan` and of `weir plan -o json`. */
export interface PlanView {
  /** The file. */
  readonly path: string;
  /** What it was compared with; `version` is null for a file that is not in use. */
  readonly against: { readonly path: string; readonly version: number | null };
  /** A reload would change something. */
  readonly changes: boolean;
  /** The reload would be refused, and nothing changed; flows, slots and network are not looked at then. */
  readonly refusal: { readonly code: string; readonly message: string; readonly remedy: string } | null;
  /** Outside `services`. */
  readonly settings: readonly SettingChange[];
  /** Those that something changes for. */
  readonly services: readonly ServicePlan[];
  /** Drains by command that the file ends, as `SERVICE/BACKEND`. */
  readonly drainsEnded: readonly string[];
  /** Of all services; null: no table to look into. */
  readonly flows: FlowFates | null;
  readonly network: NetworkChanges | null;
}

/** A key of the file, by its place in it. What is absent, or says nothing, is `none`. */
export interface FieldChange {
  readonly key: string;
  readonly before: string;
  readonly after: string;
  /** Of a list: what is in one of the two only. */
  readonly added?: readonly string[];
  readonly removed?: readonly string[];
}

export interface SettingChange extends FieldChange {
  /** It takes a restart. */
  readonly restart: boolean;
}

export type Change = 'added' | 'changed' | 'removed' | 'same';

export interface ServicePlan {
  readonly name: string;
  readonly address: string;
  readonly port: number;
  readonly protocol: string;
  /** `same`: as before in the file, but something else changes for it. */
  readonly change: Change;
  readonly fields: readonly FieldChange[];
  readonly backends: readonly BackendPlan[];
  /** null: it has no Maglev table before and after. */
  readonly slots: SlotChange | null;
  readonly flows: FlowFates | null;
  /** Clients whose affinity leads them nowhere any more; null: nobody can tell. */
  readonly affinityLost: number | null;
}

export interface BackendPlan {
  readonly name: string;
  readonly address: string;
  readonly port: number;
  readonly change: Change;
  readonly fields: readonly FieldChange[];
}

/** Of a Maglev table: the slots whose backend is another afterwards. Where the hash is another too: how many clients, in slots. */
export interface SlotChange {
  readonly size: number;
  readonly changed: number;
  /** `changed` of `size`. */
  readonly share: number;
}

/** Live connections by what becomes of them. */
export interface FlowFates {
  readonly live: number;
  /** They go on as before. */
  readonly kept: number;
  /** They pick a backend again with their next opening packet. */
  readonly moved: number;
  /** They go on until the drain time of their backend is over. */
  readonly cutLater: number;
  /** They end at once, and their ends are told. */
  readonly cut: number;
}

export interface NetworkChanges {
  /** What the reload would execute, in order. */
  readonly commands: readonly string[];
  /** What is executed when no connection needs any more what has left the file. */
  readonly later: readonly string[];
  readonly notes: readonly string[];
}
