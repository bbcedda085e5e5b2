import { closeSync } from 'node:fs';
import { WeirError } from '../base/errors.js';
import type { Config } from '../config/config.js';
import { formatProblem, loadConfig, requireConfig } from '../config/load.js';
import { type CollectionFigures, readCollectionFigures } from '../conntrack/gc.js';
import { allocateTable, type TableMemory } from '../conntrack/memory.js';
import { type TableFigures, TableReader } from '../conntrack/table-reader.js';
import { type DataPath, startDataPath } from '../datapath/data-path.js';
import { BACKEND_FLAGS, BACKEND_WORDS, COUNTER_ROWS, TAKES_NEW } from '../datapath/snapshot.js';
import { bootClock } from '../io/boot-clock.js';
import { openTun, type Tun } from '../io/tun.js';
import { formatIpv4 } from '../wire/address.js';
import { type Compiled, compile } from './compile.js';
import { type Flow, type FlowFilter, listFlows, matchRecords } from './flows.js';
import { Identities } from './identity.js';
import type { Log } from './log.js';
import { NetworkSetup } from './network.js';
import { type NetworkNeeds, NO_NEEDS } from './network-plan.js';
import type { BackendView, ReloadView, ServiceView, StatusView } from './views.js';

export interface RuntimeOptions {
  readonly configPath: string;
  readonly log: Log;
  /** The data path has ended by itself: the process should tear down and exit. */
  readonly onFailure: (error: WeirError) => void;
}

/**
 * A running gateway: the device, its network, the tables and the data path, and the road a configuration takes to it. Start and
 * stop order:
 *
 *     config -> TUN -> tables -> data path -> network -> running
 *     running -> network -> data path -> TUN
 *
 * The network comes last and goes first, so that no packet is led into a device that nobody reads. A step that fails takes back those
 * before it.
 */
export class Runtime {
  static async start(options: RuntimeOptions): Promise<Runtime> {
    const config = requireConfig(options.configPath);
    requireSupported(config);
    const { log } = options;
    const tun = openTun(config.device.name, { offload: config.device.offload });
    log.info({ event: 'device-opened', device: tun.name }, tun.note);
    const identities = new Identities();
    const clock = bootClock();
    const compiled = compile(config, identities, { isUp: () => true, nowMs: clock.nowMs() });
    const tables = { tcp: allocateTable(config.conntrack.tcpEntries), any: allocateTable(config.conntrack.anyEntries) };
    const network = new NetworkSetup(config);
    let dataPath: DataPath | undefined;
    try {
      dataPath = await startDataPath({
        fd: tun.fd,
        vnetHeader: tun.vnetHeader,
        udpSegmentation: tun.udpSegmentation,
        mtu: config.device.mtu,
        engine: config.device.engine,
        tables,
        ...(config.conntrack.gcIntervalMs === null ? {} : { gcIntervalMs: config.conntrack.gcIntervalMs }),
        snapshot: compiled.snapshot,
        recovering: true,
        onFailure: options.onFailure,
      });
      log.info({ event: 'engine', engine: dataPath.features.engine }, dataPath.note);
      const report = await network.apply();
      for (const note of report.notes) log.warn({ event: 'network-note' }, note);
      log.info(
        { event: 'network-applied', commands: report.commands.length },
        'routes, rules and settings are in place',
      );
    } catch (error) {
      await network.remove().catch(() => {});
      await dataPath?.stop();
      closeSync(tun.fd);
      throw error;
    }
    return new Runtime(options, config, tun, tables, identities, compiled, network, dataPath);
  }

  readonly #options: RuntimeOptions;
  readonly #tun: Tun;
  readonly #tables: { readonly tcp: TableMemory; readonly any: TableMemory };
  readonly #readers: readonly TableReader[];
  readonly #identities: Identities;
  readonly #network: NetworkSetup;
  readonly #dataPath: DataPath;
  readonly #clock = bootClock();
  readonly #startedAtMs = Date.now();
  #config: Config;
  #compiled: Compiled;
  #lastReload: ReloadView = { success: true, at: new Date().toISOString(), problems: [] };
  #appliedAtMs = Date.now();
  #queue: Promise<unknown> = Promise.resolve();
  #stopped: Promise<void> | undefined;

  private constructor(
    options: RuntimeOptions,
    config: Config,
    tun: Tun,
    tables: { readonly tcp: TableMemory; readonly any: TableMemory },
    identities: Identities,
    compiled: Compiled,
    network: NetworkSetup,
    dataPath: DataPath,
  ) {
    this.#options = options;
    this.#config = config;
    this.#tun = tun;
    this.#tables = tables;
    this.#readers = [new TableReader(tables.tcp), new TableReader(tables.any)];
    this.#identities = identities;
    this.#compiled = compiled;
    this.#network = network;
    this.#dataPath = dataPath;
  }

  get config(): Config {
    return this.#config;
  }

  /** STAT_* rows, live. */
  get stats(): Float64Array {
    return this.#dataPath.stats;
  }

  /** COUNTER_* rows by backend id, live. */
  get counters(): Float64Array {
    return this.#compiled.snapshot.counters;
  }

  get lastReload(): ReloadView {
    return this.#lastReload;
  }

  /** Wall-clock time at which the running configuration came into force, ms. */
  get appliedAtMs(): number {
    return this.#appliedAtMs;
  }

  /**
   * Reads the file again and makes it the running configuration, all or nothing: a file with a mistake, or one that asks for what only
   * a restart can change, leaves everything as it is.
   */
  reload(): Promise<ReloadView> {
    const result = this.#queue.then(() => this.#reload());
    this.#queue = result.catch(() => {});
    return result;
  }

  status(): StatusView {
    const { features, note } = this.#dataPath;
    return {
      pid: process.pid,
      uptimeSeconds: Math.round((Date.now() - this.#startedAtMs) / 1000),
      configFile: this.#options.configPath,
      configVersion: this.#compiled.snapshot.version,
      configAgeSeconds: Math.round((Date.now() - this.#appliedAtMs) / 1000),
      lastReload: this.#lastReload,
      device: {
        name: this.#tun.name,
        mtu: this.#config.device.mtu,
        engine: features.engine,
        note,
        offloads: this.#tun.offloads,
      },
      services: this.services(),
    };
  }

  services(): ServiceView[] {
    return this.#config.services.map((service) => {
      const identity = this.#identities.service(service);
      return {
        id: identity.id,
        name: service.name,
        vip: `${service.address.text}:${service.port}`,
        protocol: service.protocol,
        algorithm: service.algorithm,
        mode: service.mode,
        backends: service.backends.map((backend) =>
          this.#backendView(this.#identities.backend(identity, backend).id, backend),
        ),
      };
    });
  }

  /** The connections that live, one by one. */
  flows(filter: FlowFilter): Generator<Flow, void, void> {
    return listFlows(this.#readers, this.#identities, this.#clock.nowMs(), filter);
  }

  /** Removes the connections a filter names; resolves to how many. */
  async flushFlows(filter: FlowFilter): Promise<number> {
    let count = 0;
    for (const [table, reader] of [
      ['tcp', this.#readers[0]!],
      ['any', this.#readers[1]!],
    ] as const) {
      const records: number[] = [];
      const commits: number[] = [];
      for (const record of matchRecords(reader, this.#identities, this.#clock.nowMs(), filter)) {
        records.push(record);
        commits.push(reader.words[14]!);
      }
      if (records.length > 0)
        count += await this.#dataPath.flush(table, Int32Array.from(records), Int32Array.from(commits));
    }
    return count;
  }

  /** Live entries (those that have not expired) and the figures of each table. */
  tables(): { name: 'tcp' | 'any'; live: number; figures: TableFigures }[] {
    const nowMs = this.#clock.nowMs();
    return (['tcp', 'any'] as const).map((name, i) => {
      const reader = this.#readers[i]!;
      return { name, live: reader.countLive(nowMs), figures: reader.figures() };
    });
  }

  collection(): CollectionFigures {
    return readCollectionFigures(this.#tables.tcp);
  }

  /** Takes everything down that `start` put up. Idempotent. */
  stop(): Promise<void> {
    this.#stopped ??= (async () => {
      await this.#queue;
      try {
        await this.#network.remove();
      } finally {
        await this.#dataPath.stop();
        closeSync(this.#tun.fd);
      }
    })();
    return this.#stopped;
  }

  async #reload(): Promise<ReloadView> {
    const { log, configPath } = this.#options;
    const startedMs = performance.now();
    const at = new Date().toISOString();
    try {
      const { config, problems } = loadConfig(configPath);
      if (config === null) {
        this.#lastReload = {
          success: false,
          at,
          problems: problems.map((problem) => formatProblem(configPath, problem)),
        };
      } else {
        requireSupported(config);
        requireSameFoundations(this.#config, config);
        const compiled = compile(config, this.#identities, {
          isUp: () => true,
          nowMs: this.#clock.nowMs(),
          previous: this.#compiled,
        });
        // The way back must be there before the first packet goes to a new backend.
        await this.#network.update(config, this.#retained(compiled));
        await this.#dataPath.publish(compiled.snapshot);
        this.#config = config;
        this.#compiled = compiled;
        this.#appliedAtMs = Date.now();
        this.#lastReload = { success: true, at, problems: [] };
      }
    } catch (error) {
      const { message, remedy } = error as WeirError;
      this.#lastReload = { success: false, at, problems: [remedy ? `${message}. ${remedy}` : message] };
    }
    const tookMs = Math.round(performance.now() - startedMs);
    if (this.#lastReload.success) {
      log.info(
        { event: 'reload-applied', version: this.#compiled.snapshot.version, tookMs },
        'the new configuration is in force',
      );
    } else {
      const { problems } = this.#lastReload;
      log.error({ event: 'reload-refused', problems }, 'the configuration is refused; the old one stays in force');
    }
    return this.#lastReload;
  }

  /** What flows need whose backend or service has left the file and whose drain time is not over. */
  #retained({ snapshot: { cutAt } }: Compiled): NetworkNeeds {
    const nowMs = this.#clock.nowMs();
    const addresses = new Set<string>();
    const endpoints = [];
    for (let id = 1; id < cutAt.length; id++) {
      if (cutAt[id] === Number.POSITIVE_INFINITY || cutAt[id]! <= nowMs) continue;
      const backend = this.#identities.backendById(id);
      const service = backend && this.#identities.serviceById(backend.service);
      if (backend === undefined || service === undefined) continue;
      addresses.add(formatIpv4(service.vip));
      endpoints.push({ address: formatIpv4(backend.address), port: backend.port, protocol: service.protocol });
    }
    return endpoints.length === 0 ? NO_NEEDS : { addresses: [...addresses], endpoints };
  }

  #backendView(
    id: number,
    { name, address, port, weight }: Config['services'][number]['backends'][number],
  ): BackendView {
    const { backends, counters } = this.#compiled.snapshot;
    const [txPackets, txBytes, rxPackets, rxBytes, connections] = counters.subarray(
      id * COUNTER_ROWS,
      (id + 1) * COUNTER_ROWS,
    );
    return {
      id,
      name,
      endpoint: `${address.text}:${port}`,
      weight,
      takesNew: (backends[id * BACKEND_WORDS + BACKEND_FLAGS]! & TAKES_NEW) !== 0,
      connections: connections!,
      packets: { original: txPackets!, reply: rxPackets! },
      bytes: { original: txBytes!, reply: rxBytes! },
    };
  }
}

/** What this version can be configured for, but not run. */
function requireSupported(config: Config): void {
  const remedy = 'Use mode dnat or snat.';
  if (config.role === 'node') throw new WeirError('NOT_SUPPORTED', 'role node cannot be run yet', 'Use role gateway.');
  const dsr = config.services.find(({ mode }) => mode === 'dsr');
  if (dsr !== undefined)
    throw new WeirError('NOT_SUPPORTED', `service ${dsr.name}: mode dsr cannot be run yet`, remedy);
}

/** The device and the tables are made once. */
function requireSameFoundations(before: Config, after: Config): void {
  const foundations = ({ role, device, conntrack, network, admin }: Config): Record<string, unknown> => ({
    role,
    device,
    'conntrack.tcpEntries': conntrack.tcpEntries,
    'conntrack.anyEntries': conntrack.anyEntries,
    'conntrack.gc.interval': conntrack.gcIntervalMs,
    'conntrack.stateFile': conntrack.stateFile,
    'network.manage': network.manage,
    'network.table': network.table,
    admin,
  });
  const was = foundations(before);
  const changed = Object.entries(foundations(after)).filter(
    ([key, value]) => JSON.stringify(value) !== JSON.stringify(was[key]),
  );
  if (changed.length === 0) return;
  const keys = changed.map(([key]) => key).join(', ');
  throw new WeirError(
    'NOT_SUPPORTED',
    `a reload cannot change ${keys}`,
    'Restart weir for that, or take the change back.',
  );
}
