import { isIPv4, isIPv6 } from 'node:net';
import { formatDuration } from '../config/duration.js';
import type { Draft, DraftBackend, DraftService, Origin, Remark } from './draft.js';

/**
 * Virtual services as `ipvsadm -S -n` and `ipvsadm-save -n` print them, a rule to a line:
 *
 *     -A -t 10.96.0.10:80 -s wrr -p 10800           a virtual service: -t TCP, -u UDP, -f a firewall mark
 *     -a -t 10.96.0.10:80 -r 10.2.0.11:8080 -m -w 1 a server of it: -m NAT, -g direct routing, -i tunnel
 *
 * Long options are the same, and so is a line that begins with `ipvsadm`. Empty lines and # comments are passed over.
 */

type Values = Map<string, { readonly value: string; readonly column: number }>;

/** Options that take a value, by their one letter or as they are. */
const WITH_VALUE = new Set('t u f s p M r w x y b sctp-service pe tun-type tun-port'.split(' '));
/** These may be without one. */
const OPTIONAL_VALUE = new Set(['p']);
const NO_VALUE = new Set('A a m g i o 6 ops n tun-nocsum tun-csum tun-remcsum'.split(' '));

const LONG: Readonly<Record<string, string>> = {
  'add-service': 'A',
  'add-server': 'a',
  'tcp-service': 't',
  'udp-service': 'u',
  'fwmark-service': 'f',
  scheduler: 's',
  persistent: 'p',
  netmask: 'M',
  'real-server': 'r',
  masquerading: 'm',
  gatewaying: 'g',
  ipip: 'i',
  weight: 'w',
  'u-threshold': 'x',
  'l-threshold': 'y',
  'sched-flags': 'b',
  numeric: 'n',
};

/** ipvsadm's when -p comes alone. */
const DEFAULT_PERSISTENCE_SECONDS = 300;
const ONE_CLIENT = '255.255.255.255';
const MAX_WEIGHT = 65535;
const MAX_CONNECTIONS = 0x7fffff;
/** Long enough that nothing is ever forgotten that the hash would not choose again. */
const HASHED_AFFINITY = '5m';

interface Scheduler {
  readonly isHash: boolean;
  /** Whether it looks at weights other than 0. */
  readonly isWeighted: boolean;
  /** What becomes of it. */
  readonly loss: string;
}

const LOT = 'drawn by lot, with the same shares';
const LEAST = 'drawn by lot: open connections are not looked at';

const SCHEDULERS: Readonly<Record<string, Scheduler>> = {
  rr: { isHash: false, isWeighted: false, loss: `rr becomes random: ${LOT}` },
  wrr: { isHash: false, isWeighted: true, loss: `wrr becomes random: ${LOT}` },
  lc: { isHash: false, isWeighted: false, loss: `lc becomes random: ${LEAST}` },
  wlc: { isHash: false, isWeighted: true, loss: `wlc becomes random: ${LEAST}` },
  sed: { isHash: false, isWeighted: true, loss: `sed becomes random: ${LEAST}` },
  nq: { isHash: false, isWeighted: true, loss: `nq becomes random: ${LEAST}` },
  lblc: { isHash: false, isWeighted: true, loss: `lblc becomes random: ${LEAST}` },
  lblcr: { isHash: false, isWeighted: true, loss: `lblcr becomes random: ${LEAST}` },
  dh: { isHash: false, isWeighted: false, loss: 'dh becomes random: destinations are not hashed' },
  twos: { isHash: false, isWeighted: true, loss: `twos becomes random: ${LEAST}` },
  fo: { isHash: false, isWeighted: true, loss: 'fo becomes random: the heaviest is no longer the only one' },
  ovf: { isHash: false, isWeighted: true, loss: 'ovf becomes random: the heaviest is no longer filled first' },
  sh: { isHash: true, isWeighted: true, loss: 'sh becomes maglev: as steady, but by another table' },
  mh: { isHash: true, isWeighted: true, loss: 'mh becomes maglev: as steady, but by another hash' },
};

interface Virtual {
  readonly endpoint: { readonly address: string; readonly port: number };
  readonly protocol: 'tcp' | 'udp';
  readonly scheduler: Scheduler;
  readonly flags: readonly string[];
  readonly affinity: string | null;
  readonly origin: Origin;
  readonly servers: Server[];
}

interface Server extends DraftBackend {
  readonly forwarding: 'm' | 'g' | 'i';
  readonly origin: Origin;
}

/** @param hasTunnel whether the configuration it goes into has `tunnel.address`, which mode dsr needs */
export function draftOfIpvs(file: string, text: string, hasTunnel: boolean): Draft {
  const reader = new RuleReader(file);
  text.split('\n').forEach((line, i) => {
    reader.read(line, i + 1);
  });
  const services = reader.virtuals.map((virtual) => draft(virtual, hasTunnel, reader));
  return { services, warnings: reader.warnings, faults: reader.faults };
}

class RuleReader {
  readonly warnings: Remark[] = [];
  readonly faults: Remark[] = [];
  readonly #virtuals = new Map<string, Virtual>();
  readonly #file: string;

  constructor(file: string) {
    this.#file = file;
  }

  get virtuals(): Virtual[] {
    return [...this.#virtuals.values()];
  }

  warn(origin: Origin, message: string): void {
    this.warnings.push({ ...origin, message });
  }

  fault(origin: Origin, message: string): void {
    this.faults.push({ ...origin, message });
  }

  read(text: string, line: number): void {
    const words = [...text.matchAll(/\S+/g)].map((match) => ({ word: match[0], column: match.index + 1 }));
    if (words.length === 0 || words[0]!.word.startsWith('#')) return;
    const start: Origin = { file: this.#file, line, column: words[0]!.column, subject: '' };
    if (/^(.*\/)?ipvsadm$/.test(words[0]!.word)) words.shift();
    const options = this.#options(words, start);
    if (options === null) return;
    if (options.has('A') === options.has('a'))
      this.fault(start, 'must add a service (-A) or a server (-a), as `ipvsadm -S -n` prints them');
    else if (options.has('A')) this.#readService(options, start);
    else this.#readServer(options, start);
  }

  #options(words: readonly { word: string; column: number }[], start: Origin): Values | null {
    const options: Values = new Map();
    for (let i = 0; i < words.length; i++) {
      const { word, column } = words[i]!;
      const [, dashes, given, inline] = /^(--?)([^=]+)(?:=(.*))?$/.exec(word) ?? [];
      const name = dashes === undefined ? '' : (LONG[given!] ?? given!);
      const next = words[i + 1];
      if (WITH_VALUE.has(name)) {
        const hasNext = next !== undefined && !next.word.startsWith('-');
        if (inline === undefined && !hasNext && !OPTIONAL_VALUE.has(name)) {
          this.fault({ ...start, column }, `${word} must have a value`);
          return null;
        }
        options.set(name, {
          value: inline ?? (hasNext ? next.word : ''),
          column: inline === undefined && hasNext ? next.column : column,
        });
        if (inline === undefined && hasNext) i++;
      } else if (NO_VALUE.has(name)) options.set(name, { value: '', column });
      else {
        this.fault({ ...start, column }, `${word} is nothing that \`ipvsadm -S -n\` prints`);
        return null;
      }
    }
    return options;
  }

  /** The service that a line is about; `null`: one that is left out, or there is a fault. */
  #target(options: Values, start: Origin): { key: string; protocol: 'tcp' | 'udp'; endpoint: Endpoint } | null {
    const kinds = ['t', 'u', 'f', 'sctp-service'].filter((kind) => options.has(kind));
    if (kinds.length !== 1) {
      this.fault(start, 'must name one service: -t, -u or -f');
      return null;
    }
    const kind = kinds[0]!;
    const { value, column } = options.get(kind)!;
    const key = `-${kind} ${value}`;
    const leaveOut = (why: string): null => {
      if (options.has('A')) this.warn({ ...start, subject: key }, `left out, with its servers: ${why}`);
      return null;
    };
    if (kind === 'f') return leaveOut('a firewall mark is no address');
    if (kind === 'sctp-service') return leaveOut('SCTP is not balanced');
    if (value.startsWith('[')) return leaveOut('weir balances IPv4');
    const endpoint = this.#endpoint(value, { ...start, column });
    if (endpoint === null) return null;
    if (endpoint.port === 0) return leaveOut('port 0 is all ports');
    return { key, protocol: kind === 't' ? 'tcp' : 'udp', endpoint };
  }

  #endpoint(text: string, origin: Origin): Endpoint | null {
    const colon = text.lastIndexOf(':');
    const [address, port] = colon < 0 ? [text, '0'] : [text.slice(0, colon), text.slice(colon + 1)];
    if (!isIPv4(address)) {
      const what = isIPv6(address) ? 'IPv6' : 'a name';
      this.fault(origin, `"${text}" must be an IPv4 address and a port, not ${what}: print with \`ipvsadm -S -n\``);
      return null;
    }
    if (!/^\d{1,5}$/.test(port) || Number(port) > 65535) {
      this.fault(origin, `"${text}" must have a port from 0 to 65535: print with \`ipvsadm -S -n\``);
      return null;
    }
    return { address, port: Number(port) };
  }

  #readService(options: Values, start: Origin): void {
    const target = this.#target(options, start);
    if (target === null) return;
    const { key, protocol, endpoint } = target;
    const origin = { ...start, subject: key };
    if (this.#virtuals.has(key)) {
      this.fault(origin, `is added already, in line ${this.#virtuals.get(key)!.origin.line}`);
      return;
    }
    const named = options.get('s') ?? { value: 'wlc', column: start.column };
    const scheduler = SCHEDULERS[named.value];
    if (scheduler === undefined) {
      this.fault({ ...origin, column: named.column }, `scheduler ${named.value} is none that is known`);
      return;
    }
    const flags = (options.get('b')?.value ?? '').split(',').filter(Boolean);
    const affinity = this.#affinity(options, origin);
    if (options.has('o') || options.has('ops'))
      this.warn(origin, 'one-packet scheduling is not kept: datagrams of one port go to one backend');
    if (options.has('pe')) this.warn(origin, `persistence engine ${options.get('pe')!.value} is not kept`);
    const by = { endpoint, protocol, scheduler, flags, affinity, origin, servers: [] };
    this.#virtuals.set(key, by);
  }

  #affinity(options: Values, origin: Origin): string | null {
    const persistent = options.get('p');
    if (persistent === undefined) return null;
    const text = persistent.value === '' ? String(DEFAULT_PERSISTENCE_SECONDS) : persistent.value;
    const netmask = options.get('M')?.value ?? ONE_CLIENT;
    if (netmask !== ONE_CLIENT) this.warn(origin, `netmask ${netmask} is not kept: affinity is by client address`);
    if (/^[1-9]\d{0,6}$/.test(text)) return formatDuration(Number(text) * 1000);
    this.fault({ ...origin, column: persistent.column }, `-p must be a number of seconds (got "${text}")`);
    return null;
  }

  #readServer(options: Values, start: Origin): void {
    const target = this.#target(options, start);
    if (target === null) return;
    const virtual = this.#virtuals.get(target.key);
    const origin = { ...start, subject: target.key };
    const real = options.get('r');
    if (virtual === undefined) {
      this.fault(origin, 'has no -A line above');
      return;
    }
    if (real === undefined) {
      this.fault(origin, 'must name a server: -r');
      return;
    }
    if (real.value.startsWith('[')) {
      this.warn(origin, `${real.value} is left out: weir balances IPv4`);
      return;
    }
    const endpoint = this.#endpoint(real.value, { ...origin, column: real.column });
    if (endpoint === null) return;
    const forwarding = (['m', 'i', 'g'] as const).find((each) => options.has(each)) ?? 'g';
    // Only NAT can change the port; the others ignore what is written.
    const port = forwarding === 'm' && endpoint.port > 0 ? endpoint.port : virtual.endpoint.port;
    if (endpoint.port > 0 && endpoint.port !== port)
      this.warn(
        { ...origin, column: real.column },
        `port ${endpoint.port} of ${endpoint.address} is not kept: with -${forwarding} IPVS delivers to port ${port} of the service, whatever is written`,
      );
    if (virtual.servers.some((each) => each.address === endpoint.address && each.port === port)) {
      this.fault({ ...origin, column: real.column }, `server ${endpoint.address}:${port} is added already`);
      return;
    }
    const weight = this.#number(options, 'w', 1, MAX_WEIGHT, origin);
    const most = this.#number(options, 'x', 0, MAX_CONNECTIONS, origin);
    if (this.#number(options, 'y', 0, MAX_CONNECTIONS, origin) > 0)
      this.warn(origin, 'the lower threshold (-y) is not kept: a backend is used again when one connection has ended');
    if (options.has('tun-type')) this.warn(origin, `${options.get('tun-type')!.value} is not kept: tunnels are Geneve`);
    const limit = most > 0 ? { maxConnections: most } : {};
    virtual.servers.push({ address: endpoint.address, port, weight, ...limit, forwarding, origin });
  }

  #number(options: Values, name: string, absent: number, max: number, origin: Origin): number {
    const given = options.get(name);
    if (given === undefined) return absent;
    if (/^\d{1,9}$/.test(given.value) && Number(given.value) <= max) return Number(given.value);
    this.fault({ ...origin, column: given.column }, `-${name} must be a number up to ${max} (got "${given.value}")`);
    return absent;
  }
}

interface Endpoint {
  readonly address: string;
  readonly port: number;
}

function draft(virtual: Virtual, hasTunnel: boolean, reader: RuleReader): DraftService {
  const { endpoint, protocol, scheduler, flags, affinity, origin, servers } = virtual;
  const { address, port } = endpoint;
  reader.warn(origin, scheduler.loss);
  const isByPort = flags.some((flag) => flag.endsWith('-port'));
  if (flags.some((flag) => flag.endsWith('-fallback')))
    reader.warn(origin, 'a client whose backend has weight 0 is led to another one in any case');
  // With an affinity, maglev leaves the client's port out of the hash, as these do.
  const hashed = scheduler.isHash && !isByPort ? HASHED_AFFINITY : null;
  const lasting = affinity ?? hashed;
  return {
    name: `${protocol}-${address}:${port}`,
    address,
    port,
    protocol,
    ...(scheduler.isHash ? {} : { algorithm: 'random' }),
    ...modeOf(virtual, hasTunnel, reader),
    ...(lasting === null ? {} : { affinity: lasting }),
    backends: servers.map(({ forwarding, origin, weight = 1, ...server }) => ({
      ...server,
      weight: scheduler.isWeighted ? weight : Math.min(weight, 1),
    })),
    comment: `ipvsadm ${origin.subject}`,
    origin,
  };
}

function modeOf({ servers }: Virtual, hasTunnel: boolean, reader: RuleReader): { mode?: 'dsr' } {
  const direct = servers.filter(({ forwarding }) => forwarding !== 'm');
  const [first] = direct;
  if (first === undefined) return {};
  const how = first.forwarding === 'i' ? 'tunnel (-i)' : 'direct routing (-g)';
  if (direct.length < servers.length) {
    const { origin } = first;
    reader.warn(origin, `${how} beside masquerading: a service of weir has one mode, and all become dnat`);
    return {};
  }
  if (!hasTunnel) reader.fault(first.origin, `${how} is mode dsr: name a --base FILE that has \`tunnel.address\``);
  else reader.warn(first.origin, `${how} becomes mode dsr: each backend’s host must run weir with \`role: node\``);
  return { mode: 'dsr' };
}
