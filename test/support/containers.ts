import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { mountDevices } from './bare-root.js';
import type { Compose, ComposeService } from './compose.js';
import { ENVIRONMENT, Host, type Outcome, type Plug, wire } from './hosts.js';
import { type Image, mountOverlay } from './image.js';

/**
 * `docker compose up` without Docker: networks are bridges, containers are processes with namespaces (network, mounts, processes), a root, and
 * what Docker gives and takes by default: capabilities, devices, a /proc/sys that cannot be written to, and no io_uring.
 *
 * Not done: user namespaces, cgroups, the rest of the seccomp profile, names (DNS), published ports, the host's firewall.
 *
 * To be called in a mount namespace of the caller's own.
 */

/** moby/moby, profiles and oci/caps/defaults.go. */
const DEFAULT_CAPABILITIES = [
  ...['chown', 'dac_override', 'fsetid', 'fowner', 'mknod', 'net_raw', 'setgid', 'setuid', 'setfcap', 'setpcap'],
  ...['net_bind_service', 'sys_chroot', 'kill', 'audit_write'],
];

const NO_IO_URING = fileURLToPath(new URL('./no-io-uring.py', import.meta.url));

/** Instead of Docker's init, which hands signals on to a program that, as process 1, would not heed them. */
const INIT = ['sh', '-c', 'trap "kill -s TERM %1" TERM; "$@" & wait', 'sh'];

/** In namespaces of its own; what is executed last is process 1 there. */
const CONTAIN = `
root=$1 capabilities=$2; shift 2
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
exec python3 ${NO_IO_URING} setpriv --inh-caps=-all --bounding-set "-all,$capabilities" chroot "$root" "$@"`;

export class Container {
  readonly name: string;
  readonly #image: Image;
  readonly #env: Readonly<Record<string, string>>;
  readonly #root: string;
  readonly #network: Host;
  readonly #capabilities: string;
  readonly #service: ComposeService;
  readonly #lines: string[] = [];
  #process: ChildProcess | null = null;
  /** With its exit code. */
  ended: Promise<number | null> = Promise.resolve(null);

  constructor(name: string, service: ComposeService, image: Image, network: Host, project: string, folder: string) {
    this.name = name;
    this.#service = service;
    this.#image = image;
    this.#network = network;
    this.#env = { ...ENVIRONMENT, ...image.env, ...service.environment };
    const added = (service.cap_add ?? []).map((each) => each.toLowerCase());
    this.#capabilities = [...DEFAULT_CAPABILITIES, ...added].map((each) => `+${each}`).join(',');
    this.#root = mountOverlay(image.layers, join(folder, name));
    mountDevices(
      join(this.#root, 'dev'),
      (service.devices ?? []).map((each) => each.split(':')[1]!.replace('/dev/', '')),
    );
    for (const volume of service.volumes ?? []) {
      const [from, to] = volume.split(':') as [string, string];
      const at = join(this.#root, to);
      mkdirSync(dirname(at), { recursive: true });
      writeFileSync(at, '', { flag: 'a' });
      execFileSync('mount', ['--bind', join(project, from), at]);
    }
  }

  start(): void {
    const { entrypoint, command, workdir } = this.#image;
    const words = [...(this.#service.init ? INIT : []), ...entrypoint, ...(this.#service.command ?? command)];
    const child = spawn(
      'nsenter',
      [
        ...['--net', '--target', String(this.#network.pid), '--'],
        ...['unshare', '--pid', '--mount', '--fork', '--kill-child', 'sh', '-ec', CONTAIN, 'sh'],
        ...[this.#root, this.#capabilities, ...this.#clean(), 'sh', '-c', `cd ${workdir} && exec "$@"`, 'sh', ...words],
      ],
      { stdio: ['ignore', 'pipe', 'pipe'] },
    );
    for (const stream of [child.stdout!, child.stderr!]) {
      createInterface({ input: stream }).on('line', (line) => this.#lines.push(line));
    }
    this.#process = child;
    this.ended = once(child, 'close').then(([code]) => code as number | null);
  }

  /** `docker compose exec`. */
  async exec(command: readonly string[]): Promise<Outcome> {
    const child = spawn(
      'nsenter',
      [
        ...['--net', '--pid', '--mount', '--target', String(this.firstProcess()), '--'],
        ...['setpriv', '--inh-caps=-all', '--bounding-set', `-all,${this.#capabilities}`],
        ...['chroot', this.#root, ...this.#clean(), ...command],
      ],
      { stdio: ['ignore', 'pipe', 'pipe'] },
    );
    let [stdout, stderr] = ['', ''];
    child.stdout!.setEncoding('utf8').on('data', (part: string) => {
      stdout += part;
    });
    child.stderr!.setEncoding('utf8').on('data', (part: string) => {
      stderr += part;
    });
    const [code] = (await once(child, 'close')) as [number | null];
    return { code, stdout, stderr };
  }

  /** Process 1 of the container, as the machine numbers it. */
  firstProcess(): number {
    const { pid } = this.#process!;
    const children = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim();
    if (children === '') throw new Error(`${this.name} does not run:\n${this.logs()}`);
    return Number(children.split(' ')[0]);
  }

  logs(): string {
    return this.#lines.join('\n');
  }

  /** Empty if there is none. */
  get healthcheck(): readonly string[] {
    return this.#service.healthcheck?.test.slice(1) ?? this.#image.healthcheck;
  }

  /** Until its health check says so. @throws Error with the log, when it ends before */
  async untilHealthy(): Promise<void> {
    let last = '';
    for (let attempt = 0; attempt < 100; attempt++) {
      if (!this.isRunning()) break;
      try {
        const { code, stderr } = await this.exec(this.healthcheck);
        if (code === 0) return;
        last = stderr;
      } catch (error) {
        last = String(error);
      }
      await sleep(200);
    }
    throw new Error(`${this.name} is not healthy: ${last}\n${this.logs()}`);
  }

  isRunning(): boolean {
    return this.#process !== null && this.#process.exitCode === null && this.#process.signalCode === null;
  }

  /** `docker stop`: a signal to process 1 alone. @returns its exit code; null after having been killed for not obeying */
  async stop(signal = this.#image.stopSignal, graceMs = 10_000): Promise<number | null> {
    if (!this.isRunning()) return this.ended;
    process.kill(this.firstProcess(), signal);
    const code = await Promise.race([this.ended, sleep(graceMs, 'late' as const, { ref: false })]);
    if (code !== 'late') return code;
    await this.kill();
    return null;
  }

  async kill(): Promise<void> {
    this.#process?.kill('SIGKILL');
    await this.ended;
  }

  #clean(): string[] {
    return ['env', '-i', ...Object.entries(this.#env).map(([name, value]) => `${name}=${value}`)];
  }
}

export class Project {
  readonly containers: ReadonlyMap<string, Container>;
  /** In the order in which they were. */
  readonly started: readonly string[];
  readonly #hosts: readonly Host[];

  private constructor(containers: ReadonlyMap<string, Container>, started: Iterable<string>, hosts: readonly Host[]) {
    this.containers = containers;
    this.started = [...started];
    this.#hosts = hosts;
  }

  /**
   * @param folder where the compose files are
   * @param images by name
   */
  static async up(compose: Compose, folder: string, images: Map<string, Image>, scratch: string): Promise<Project> {
    const hub = await Host.create('hub', null, scratch);
    const hosts = new Map<string, Host>();
    for (const [name, { networks }] of Object.entries(compose.services)) {
      if (networks !== undefined) hosts.set(name, await Host.create(name, null, scratch));
    }
    await connect(compose, hub, hosts);
    const containers = new Map<string, Container>();
    for (const [name, service] of Object.entries(compose.services)) {
      const network = hosts.get(service.network_mode?.replace('service:', '') ?? name)!;
      containers.set(name, new Container(name, service, images.get(service.image)!, network, folder, scratch));
    }
    const project = new Project(containers, inOrder(compose.services), [hub, ...hosts.values()]);
    for (const name of project.started) containers.get(name)!.start();
    return project;
  }

  get(name: string): Container {
    return this.containers.get(name)!;
  }

  async untilHealthy(): Promise<void> {
    for (const container of this.containers.values()) {
      if (container.healthcheck.length > 0) await container.untilHealthy();
    }
  }

  async down(): Promise<void> {
    for (const container of this.containers.values()) await container.kill();
    for (const host of this.#hosts) await host.close();
  }
}

/** A bridge for each network, whose own end is the containers' default router, as Docker has it; and the settings. */
async function connect({ services, networks }: Compose, hub: Host, hosts: ReadonlyMap<string, Host>): Promise<void> {
  const plugs: Record<string, Plug[]> = Object.fromEntries(Object.keys(networks).map((name) => [name, []]));
  const subnets = new Map(Object.entries(networks).map(([name, { ipam }]) => [name, ipam.config[0]!]));
  for (const [name, host] of hosts) {
    const joined = Object.entries(services[name]!.networks!).sort(([a], [b]) => (a < b ? -1 : 1));
    for (const [i, [network, { ipv4_address: address }]] of joined.entries()) {
      const prefix = subnets.get(network)!.subnet.split('/')[1];
      plugs[network]!.push({ host, dev: `eth${i}`, address: `${address}/${prefix}` });
    }
  }
  await wire(hub, plugs);
  for (const [network, { subnet, gateway }] of subnets) {
    await must(hub, `ip address add ${gateway}/${subnet.split('/')[1]} dev ${network}`);
  }
  for (const [name, host] of hosts) {
    const first = Object.keys(services[name]!.networks!).sort()[0];
    if (first !== undefined) await must(host, `ip route add default via ${subnets.get(first)!.gateway}`);
    for (const [key, value] of Object.entries(services[name]!.sysctls ?? {}))
      await must(host, `sysctl -qw ${key}=${value}`);
  }
}

async function must(host: Host, script: string): Promise<void> {
  const { code, stderr } = await host.run(script);
  if (code !== 0) throw new Error(`${host.name}: ${script}: ${stderr}`);
}

function inOrder(services: Compose['services']): Set<string> {
  const order = new Set<string>();
  const visit = (name: string): void => {
    for (const other of services[name]!.depends_on ?? []) visit(other);
    order.add(name);
  };
  for (const name of Object.keys(services)) visit(name);
  return order;
}
