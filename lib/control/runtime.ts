import { closeSync } from 'node:fs';
import type { Clock } from '../base/clock.js';
import { WeirError } from '../base/errors.js';
import { LEARNED_ENDPOINTS } from '../base/limits.js';
import { systemRandom } from '../base/random.js';
import type { Config } from '../config/config.js';
import { readConfigText, requireConfig } from '../config/load.js';
import { YamlPieces } from '../config/yaml-pieces.js';
import { allocateEvents } from '../conntrack/events.js';
import { allocateTable } from '../conntrack/memory.js';
import { TableReader } from '../conntrack/table-reader.js';
import { startDataPath } from '../datapath/data-path.js';
import { bootClock } from '../io/boot-clock.js';
import { openTun } from '../io/tun.js';
import { openTunnelSocket } from '../io/tunnel-socket.js';
import { probeSocket } from './admin-socket.js';
import { ConfigWatch } from './config-watch.js';
import { Desired } from './desired.js';
import { EventFeed } from './event-feed.js';
import { HealthChecker } from './health/checker.js';
import { Prober } from './health/probe.js';
import { LearnedEndpoints } from './learned.js';
import type { EventLog } from './log.js';
import { leftEndpoints, NetworkSetup } from './network.js';
import { Observer } from './observer.js';
import { stepBack, stepHelpersBack } from './priority.js';
import { logNetwork, Reloader } from './reloader.js';
import { ServiceManager } from './service-manager.js';
import { openStateFile, type StateFile } from './state-file.js';
import { countParts, sayCounts } from './summary.js';
import { adoptSurvivors } from './survivors.js';
import type { AdminEndpoint, AdminPlaces, RunningWeir } from './view.js';

/**
 * A weir from start to stop. Every step of the start has its undoing, and the undoings run in reverse: at the stop, and as
 * far as the start had come when a step fails or a signal arrives in its middle.
 *
 *     configuration -> nobody else here? -> device -> (node: socket) -> tables -> data path -> network -> health -> admin -> ready
 *
 * The device is the lock: the kernel gives it to one process, so that nothing of a running weir is touched by a second. The
 * network comes after the data path and goes before it, so that no packet is led to where nobody reads; what a killed weir left
 * behind is adopted or removed by it.
 */
export interface RuntimeOptions {
  readonly configPath: string;
  /** Instead of the configuration's `admin.socket`. */
  readonly socket?: string;
  readonly version: string;
  readonly log: EventLog;
  /** Serves the admin API; resolves when it does. @throws WeirError ADDRESS_IN_USE, ALREADY_RUNNING, NO_PERMISSION */
  openAdmin(weir: RunningWeir, places: AdminPlaces): Promise<AdminEndpoint>;
}

/** After this the process ends, whatever is still under way. */
const STOP_MS = 1900;

/** Of the health checks. A suspended machine finds its backends as it left them: time stands still meanwhile. */
const CHECK_CLOCK: Clock = { nowMs: () => performance.now() };

/**
 * Runs until SIGTERM or SIGINT, or until the data path fails. SIGHUP reads the configuration again, and so does a change of its file.
 *
 * @returns the exit code: 0 after a signal, 1 after a failure.
 * @throws WeirError when the start fails; everything is undone by then.
 */
export async function runWeir(options: RuntimeOptions): Promise<number> {
  const runtime = new Runtime(options);
  const stop = (signal: NodeJS.Signals): void => runtime.end(0, signal);
  const reload = (): void => void runtime.reload().catch(() => {});
  // For good: until Node.js itself takes them away, a second Ctrl-C changes neither what is tidied up nor the exit code.
  process.on('SIGTERM', stop).on('SIGINT', stop).on('SIGHUP', reload);
  return await runtime.run();
}

class Runtime {
  readonly #options: RuntimeOptions;
  readonly #log: EventLog;
  readonly #manager: ServiceManager;
  readonly #undo: { readonly step: string; readonly run: () => unknown }[] = [];
  readonly #ended: Promise<{ code: number; why: string }>;
  #end!: (how: { code: number; why: string }) => void;
  #isEnding = false;
  #reloader: Reloader | undefined;

  constructor(options: RuntimeOptions) {
    this.#options = options;
    this.#log = options.log;
    this.#manager = new ServiceManager(process.env, options.log);
    this.#ended = new Promise((resolve) => {
      this.#end = resolve;
    });
  }

  /** Asks for the end; the first one counts. */
  end(code: number, why: string): void {
    this.#isEnding = true;
    this.#end({ code, why });
  }

  async reload(): Promise<void> {
    await this.#reloader?.reload();
  }

  async run(): Promise<number> {
    const beganMs = performance.now();
    this.#undo.push({ step: 'service manager', run: () => this.#manager.close() });
    try {
      await this.#start(beganMs);
    } catch (error) {
      await this.#unwind();
      throw error;
    }
    const { code, why } = await this.#ended;
    this.#manager.stopping(why);
    this.#log.info('stopping', `stopping: ${why}`, { why });
    const stopBeganMs = performance.now();
    const deadline = setTimeout(() => process.exit(1), STOP_MS);
    const isClean = await this.#unwind();
    clearTimeout(deadline);
    this.#log.info('stopped', 'stopped', { tookMs: Math.round(performance.now() - stopBeganMs) });
    return isClean ? code : 1;
  }

  async #start(beganMs: number): Promise<void> {
    const { configPath, version, log } = this.#options;
    const configText = readConfigText(configPath);
    const pieces = new YamlPieces();
    const config = requireConfig(configPath, configText, pieces);
    const socket = this.#options.socket ?? config.admin.socket;
    await refuseSecond(socket);

    const { name, offload, engine, mtu } = config.device;
    const tun = openTun(name, { offload });
    this.#undo.push({ step: 'device', run: () => closeSync(tun.fd) });
    log.info('starting', `weir ${version} starts`, { version, pid: process.pid, config: configPath });
    log.info('device-opened', `${name}: ${tun.note}`, { device: name });
    const tunnelFd = this.#openTunnel(config);

    const clock = bootClock();
    const { tcpEntries, anyEntries, gcIntervalMs } = config.conntrack;
    const stateFile = this.#openStateFile(config, clock.nowMs());
    const tables = stateFile?.tables ?? { tcp: allocateTable(tcpEntries), any: allocateTable(anyEntries) };
    const survivors = stateFile?.isResumed ? adoptSurvivors(tables) : undefined;
    const events = allocateEvents();
    const left = config.role === 'node' && config.network.manage ? await leftEndpoints(config) : [];
    const learned = new LearnedEndpoints();
    const checker = new HealthChecker({
      clock: CHECK_CLOCK,
      random: systemRandom(),
      prober: new Prober(),
      log,
      onChange: () => void this.#reloader?.refreshHealth(),
    });
    const earlier = { survivors, learned: left.slice(0, LEARNED_ENDPOINTS) };
    const desired = new Desired(config, clock.nowMs(), earlier, (backend) => checker.isUp(backend));
    stepHelpersBack();
    const path = await startDataPath({
      role: config.role,
      fd: tun.fd,
      ...(tunnelFd === null ? {} : { tunnelFd }),
      vnetHeader: tun.vnetHeader,
      udpSegmentation: tun.udpSegmentation,
      mtu,
      engine,
      tables: stateFile?.mapped ?? tables,
      events,
      ...(gcIntervalMs === null ? {} : { gcIntervalMs }),
      snapshot: desired.snapshot,
      recovering: survivors === undefined,
      onFailure: (error) => this.#fail(error),
      onEndpoint: (...endpoint) => learned.learn(...endpoint),
    });
    this.#undo.push({ step: 'data path', run: () => path.stop() });
    log.info('engine', path.note, { ...path.features });
    stepBack();
    if (this.#isEnding) return;

    const network = new NetworkSetup(config);
    this.#undo.push({ step: 'network', run: () => network.remove() });
    logNetwork(log, config, await network.apply(desired.retainedNeeds()));
    if (this.#isEnding) return;

    const readers = { tcp: new TableReader(tables.tcp), any: new TableReader(tables.any) };
    const check = (): void => checker.configure(desired.checked());
    const source = { configPath, configText, pieces, onApplied: check };
    const manager = this.#manager;
    const sayState = (): string => `${sayCounts(countParts(desired.config))}${refusalOf(reloader)}`;
    const onLoading = (isOver: boolean): void => (isOver ? manager.ready(sayState()) : manager.reloading());
    const reloader = new Reloader({ ...source, desired, path, network, readers, clock, log, onLoading });
    this.#undo.push({ step: 'reloads', run: () => reloader.close() });
    this.#reloader = reloader;
    if (config.role === 'node') {
      this.#undo.push({ step: 'learned endpoints', run: () => learned.close() });
      await learned.begin({ desired, reloader, readers, clock, log });
    }
    check();
    this.#undo.push({ step: 'health checks', run: () => checker.close() });
    const fileWatch = new ConfigWatch({ path: configPath, onChange: () => reloader.reloadIfChanged() });
    this.#undo.push({ step: 'file watch', run: () => fileWatch.close() });
    const feed = new EventFeed(events, desired.identities, clock);
    const parts = {
      version,
      tun,
      tables,
      readers,
      events: feed,
      desired,
      path,
      network,
      clock,
      reloader,
      checker,
      log,
    };
    const observer = new Observer(parts);
    const { listen, dashboard } = config.admin;
    const admin = await this.#options.openAdmin(observer, { socket, listen, dashboard });
    this.#undo.push({ step: 'admin', run: () => admin.close() });
    if (this.#isEnding) return;

    const startMs = Math.round(performance.now() - beganMs);
    const counts = countParts(config);
    manager.ready(sayState());
    manager.watch(() => path.answers());
    log.info('ready', `ready after ${startMs} ms: ${sayCounts(counts)}`, { startMs, socket, listen, ...counts });
  }

  #openStateFile({ conntrack: { stateFile, tcpEntries, anyEntries } }: Config, nowMs: number): StateFile | undefined {
    if (stateFile === null) return undefined;
    const file = openStateFile(stateFile, { tcpEntries, anyEntries }, nowMs, this.#log);
    this.#undo.push({ step: 'state file', run: () => file.close() });
    return file;
  }

  /** @returns the socket of a node; null: a gateway has none */
  #openTunnel({ role, tunnel: { address, port } }: Config): number | null {
    if (role !== 'node' || address === null) return null;
    const { fd, joins } = openTunnelSocket(address.word, port);
    this.#undo.push({ step: 'tunnel', run: () => closeSync(fd) });
    const how = joins ? 'datagrams may arrive joined' : 'the kernel does not join datagrams';
    this.#log.info('tunnel-opened', `tunnels end at UDP ${address.text}:${port}; ${how}`, {
      address: address.text,
      port,
    });
    return fd;
  }

  #fail({ code, message, remedy }: WeirError): void {
    this.#log.error('device-failed', message, { code, remedy });
    this.end(1, 'the data path failed');
  }

  /** Undoes what was done, last first, going on after failures. @returns whether all succeeded. */
  async #unwind(): Promise<boolean> {
    let isClean = true;
    for (let last = this.#undo.pop(); last !== undefined; last = this.#undo.pop()) {
      try {
        await last.run();
      } catch (error) {
        isClean = false;
        this.#log.error('step-failed', `could not undo ${last.step}: ${(error as Error).message}`, { step: last.step });
      }
    }
    return isClean;
  }
}

function refusalOf({ last: { success } }: Reloader): string {
  return success ? '' : '; the file was refused and is not in use';
}

async function refuseSecond(socket: string): Promise<void> {
  if ((await probeSocket(socket)) !== 'alive') return;
  throw new WeirError(
    'ALREADY_RUNNING',
    `a running weir answers on ${socket}`,
    'Stop that one first, or give this one a socket (--socket) and a device.name of its own.',
  );
}
