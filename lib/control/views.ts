/** What the admin API answers with and the command line prints. Times are ISO 8601, durations seconds. */

export interface ReloadView {
  readonly success: boolean;
  readonly at: string;
  /** One line each, with position where there is one. */
  readonly problems: readonly string[];
}

export interface BackendView {
  readonly id: number;
  readonly name: string;
  readonly endpoint: string;
  readonly weight: number;
  readonly takesNew: boolean;
  /** Opened since weir started. */
  readonly connections: number;
  readonly packets: { readonly original: number; readonly reply: number };
  readonly bytes: { readonly original: number; readonly reply: number };
}

export interface ServiceView {
  readonly id: number;
  readonly name: string;
  readonly vip: string;
  readonly protocol: string;
  readonly algorithm: string;
  readonly mode: string;
  readonly backends: readonly BackendView[];
}

export interface StatusView {
  readonly pid: number;
  readonly uptimeSeconds: number;
  readonly configFile: string;
  readonly configVersion: number;
  readonly configAgeSeconds: number;
  readonly lastReload: ReloadView;
  readonly device: {
    readonly name: string;
    readonly mtu: number;
    readonly engine: string;
    readonly note: string;
    readonly offloads: {
      readonly csum: boolean;
      readonly tso4: boolean;
      readonly tso6: boolean;
      readonly uso: boolean;
    };
  };
  readonly services: readonly ServiceView[];
}

export interface TableView {
  readonly table: string;
  readonly entries: number;
  readonly limit: number;
  readonly states: Readonly<Record<string, number>>;
  readonly inserted: number;
  readonly insertFailures: number;
  readonly evicted: { readonly expired: number; readonly closing: number; readonly halfOpen: number };
}

export interface ConntrackStatsView {
  readonly tables: readonly TableView[];
  readonly gc: {
    readonly runs: number;
    readonly intervalSeconds: number;
    readonly lastPassMs: number;
    readonly lastDeleted: number;
  };
  readonly packets: {
    readonly received: number;
    readonly sent: number;
    readonly forwarded: number;
    readonly stateless: number;
  };
  /** Packets by reason, those that happened. */
  readonly reasons: Readonly<Record<string, number>>;
}

/** How an error is answered. */
export interface ErrorView {
  readonly code: string;
  readonly message: string;
  readonly remedy: string;
}
