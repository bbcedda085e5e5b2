import type { FlowJson } from '../flows.js';

/**
 * What would become of a packet, and why: the answer of `GET /v1/explain` and of `weir explain -o json`. Packets are in hexadecimal,
 * from their IP header on.
 */
export interface ExplainView {
  /** The file whose configuration decides; `version` is null where it is not in use. */
  readonly config: { readonly path: string; readonly version: number | null };
  /** What was assumed besides, one sentence each. */
  readonly assumed: readonly string[];
  readonly packet: PacketView;
  /** What happens to it in any case, in order. */
  readonly steps: readonly StepView[];
  /** How it ends: in one way, unless lots are drawn. */
  readonly outcomes: readonly OutcomeView[];
  /** Further outcomes that were not tried: of a service with very many backends. */
  readonly untried: number;
}

export interface PacketView {
  /** For people: `tcp 10.1.0.2:40000 > 10.96.0.10:80 syn, 40 bytes`. */
  readonly text: string;
  readonly bytes: string;
}

export interface StepView {
  readonly step: StepName;
  /** In a word: `hit`, `miss`, `refused`, `maglev`, ... */
  readonly result: string;
  /** In a sentence. */
  readonly text: string;
  /** More sentences. */
  readonly notes: readonly string[];
  /** The same for programs. */
  readonly details: Readonly<Record<string, unknown>>;
}

export type StepName =
  | 'parse'
  | 'destination'
  | 'fragment'
  | 'icmp'
  | 'conntrack'
  | 'source'
  | 'mid-stream'
  | 'affinity'
  | 'selection'
  | 'limits'
  | 'backends'
  | 'reply-tuple'
  | 'source-port'
  | 'tunnel'
  | 'entry'
  | 'answer'
  | 'rewrite'
  | 'encapsulation';

export interface OutcomeView {
  /** 1, unless lots are drawn. */
  readonly probability: number;
  /** A lot was drawn for a source port: another packet would get another one. */
  readonly portDrawn: boolean;
  /** What happens to the packet in this case. */
  readonly steps: readonly StepView[];
  readonly verdict: string;
  /** null: it is simply forwarded. */
  readonly reason: string | null;
  /** What the reason means to an operator. */
  readonly meaning: string | null;
  readonly direction: string;
  readonly service: string | null;
  readonly backend: string | null;
  readonly state: string | null;
  /** Its connection afterwards; null: none. */
  readonly entry: FlowJson | null;
  readonly out: readonly SentView[];
}

export interface SentView extends PacketView {
  /** Where the kernel would send it, as `ip route get` says; null: nobody was asked. */
  readonly route: string | null;
}
