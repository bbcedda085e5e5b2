/**
 * The configuration as weir uses it: every default filled in, every text turned into the number the program works with, deeply
 * frozen. How it is written, and what is refused, is schema.ts and rules.ts; nothing here can be out of range. What is
 * absent is `null` or an empty list, never a missing key.
 */

/** An IPv4 address: its canonical text and its unsigned 32-bit word. */
export interface Address {
  readonly text: string;
  readonly word: number;
}

/** A block of addresses, as unsigned words, both ends included. */
export interface AddressRange {
  /** As written: `10.0.0.0/8`, or a single address where those are accepted too. */
  readonly text: string;
  readonly first: number;
  readonly last: number;
}

export interface Config {
  readonly role: 'gateway' | 'node';
  readonly device: DeviceConfig;
  readonly network: NetworkConfig;
  /** Of Maglev and the selection hash; base/hash's keyFromString makes the key. */
  readonly seed: string;
  /** Entries of each Maglev table: one of MAGLEV_TABLE_SIZES. */
  readonly maglev: { readonly tableSize: number };
  readonly conntrack: ConntrackConfig;
  readonly snat: SnatConfig;
  readonly tunnel: TunnelConfig;
  readonly admin: AdminConfig;
  /** In the order of the file; empty when the file has none. */
  readonly services: readonly ServiceConfig[];
}

export interface DeviceConfig {
  readonly name: string;
  readonly mtu: number;
  readonly engine: 'auto' | 'io_uring' | 'readwrite';
  readonly offload: boolean;
}

export interface NetworkConfig {
  readonly manage: boolean;
  readonly untracked: 'pass' | 'drop';
  /** The routing table of the return path; never 0 or one of the kernel's own (253 to 255). */
  readonly table: number;
  readonly returnPath: 'auto' | 'interface';
}

export interface ConntrackConfig {
  readonly tcpEntries: number;
  readonly anyEntries: number;
  readonly timeoutsMs: TimeoutsMs;
  /** A fixed interval between full passes, or `null`: adapt it. */
  readonly gcIntervalMs: number | null;
  readonly recoveryMs: number;
  /** An absolute path, or `null`: the table lives in the process. */
  readonly stateFile: string | null;
}

/** The conntrack timers, all in ms and above 0. */
export interface TimeoutsMs {
  readonly tcp: number;
  readonly tcpSyn: number;
  readonly tcpFin: number;
  readonly any: number;
  readonly serviceTcp: number;
  readonly serviceAny: number;
  readonly serviceTcpGrace: number;
}

export interface SnatConfig {
  readonly addresses: readonly Address[];
  /** Both ends are part of the pool. */
  readonly firstPort: number;
  readonly lastPort: number;
}

export interface TunnelConfig {
  /** Set whenever the role is node or a service's mode is dsr. */
  readonly address: Address | null;
  readonly port: number;
  readonly vni: number;
  readonly inner: 'ethernet' | 'ip';
  readonly option: 'always' | 'syn';
  readonly clampMss: boolean;
  /** From whom a node takes tunnelled packets, as written; empty: from everyone. */
  readonly peers: readonly AddressRange[];
}

export interface AdminConfig {
  /** Path of the UNIX socket. */
  readonly socket: string;
  /** The read-only TCP listener, or `null`: `listen: off`. */
  readonly listen: { readonly host: string; readonly port: number } | null;
  /** Whether that has the dashboard, and what it shows. */
  readonly dashboard: boolean;
}

export interface ServiceConfig {
  readonly name: string;
  /** The VIP. */
  readonly address: Address;
  readonly port: number;
  readonly protocol: 'tcp' | 'udp';
  /** The IP protocol number: 6 or 17. */
  readonly protocolNumber: number;
  readonly algorithm: 'random' | 'maglev';
  readonly mode: 'dnat' | 'snat' | 'dsr';
  /** `affinity.clientIp`; 0: none. */
  readonly affinityMs: number;
  /** As written, neither sorted nor merged; empty: every client may connect. */
  readonly sourceRanges: readonly AddressRange[];
  /** Open connections at most, or `null`: any number. */
  readonly maxConnections: number | null;
  /** Of one client address, or `null`: any number. */
  readonly newConnectionsPerSecond: number | null;
  readonly noBackend: 'reject' | 'drop';
  readonly onRemove: 'keep' | 'reset';
  readonly drainMs: number;
  readonly icmpEcho: boolean;
  readonly health: HealthConfig | null;
  /** Whether backends that are all down take flows nevertheless. */
  readonly allDown: 'reject' | 'use-all';
  readonly backends: readonly BackendConfig[];
}

interface HealthTiming {
  readonly intervalMs: number;
  readonly timeoutMs: number;
  /** Successes in a row that make a backend up. */
  readonly rise: number;
  /** Failures in a row that make it down. */
  readonly fall: number;
}

interface HealthPort {
  /** `null`: the backend's own. */
  readonly port: number | null;
}

export interface HttpHealth extends HealthTiming, HealthPort {
  readonly type: 'http';
  readonly path: string;
  /** The Host header, or `null`: where the probe goes. */
  readonly host: string | null;
  readonly status: number;
  /** What the answer's body must contain, or `null`: anything. */
  readonly body: string | null;
}

export type HealthConfig =
  | (HealthTiming & { readonly type: 'icmp' })
  | (HealthTiming & HealthPort & { readonly type: 'tcp' })
  | HttpHealth;

export interface BackendConfig {
  /** Unique within its service; `address:port` when the file gives none. */
  readonly name: string;
  readonly address: Address;
  readonly port: number;
  /** 0 to 65535; 0: no new flows. */
  readonly weight: number;
  /** Open connections at most, or `null`: any number. */
  readonly maxConnections: number | null;
  /** Where the tunnel of a dsr service ends: the backend's host. The backend's own address when the file gives none. */
  readonly node: Address;
}
