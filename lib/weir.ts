import { readFileSync } from 'node:fs';
import { WeirError } from './base/errors.js';
import { callJson, callStream } from './cli/client.js';
import { type Actions, Exit, type FilterArguments, type LabArguments, runProgram } from './cli/program.js';
import type { ConntrackStatsView, ReloadView, ServiceView, StatusView } from './control/views.js';

/**
 * The composition root: what each command is made of. Heavy parts are imported by the command that needs them, so that
 * `weir check` answers at once.
 */
const actions: Actions = {
  async run({ config, socket, pretty }) {
    const [{ Runtime }, { AdminServer, clearStaleSocket }, { createLog }, { requireConfig }] = await Promise.all([
      import('./control/runtime.js'),
      import('./admin/server.js'),
      import('./control/log.js'),
      import('./config/load.js'),
    ]);
    const log = createLog(pretty ?? process.stdout.isTTY === true);
    const { admin } = requireConfig(config);
    const socketPath = socket ?? process.env.WEIR_SOCKET ?? admin.socket;
    await clearStaleSocket(socketPath);
    log.info({ event: 'starting', config, pid: process.pid }, 'weir starts');

    const ending = new Ending();
    const runtime = await Runtime.start({ configPath: config, log, onFailure: (error) => ending.fail(error) });
    let server: Awaited<ReturnType<typeof AdminServer.start>> | undefined;
    const reload = (): void => void runtime.reload();
    try {
      server = await AdminServer.start(runtime, socketPath, admin.listen);
      process.on('SIGHUP', reload);
      log.info({ event: 'ready', socket: socketPath }, 'weir is ready');
      const signal = await ending.wait();
      log.info({ event: 'stopping', signal }, 'weir stops');
    } catch (error) {
      const { code, message, remedy } = error as WeirError;
      log.fatal({ event: 'device-failed', code, remedy }, message);
      throw error;
    } finally {
      process.off('SIGHUP', reload);
      await server?.stop();
      await runtime.stop();
      log.info({ event: 'stopped' }, 'device, routes, rules and socket are gone');
    }
  },

  async check({ config: path, output }) {
    const { formatProblem, loadConfig } = await import('./config/load.js');
    const { config, problems } = loadConfig(path);
    if (output === 'json') print(`${JSON.stringify({ valid: config !== null, problems }, null, 2)}\n`);
    else for (const problem of problems) console.error(formatProblem(path, problem));
    if (config === null) throw new Exit(2);
    const backends = config.services.reduce((sum, service) => sum + service.backends.length, 0);
    if (output === 'text')
      print(`${path} is valid: ${count(config.services.length, 'service')}, ${count(backends, 'backend')}\n`);
  },

  async net({ config: path, clean, output }) {
    const { requireConfig } = await import('./config/load.js');
    const { cleanNetwork, describeNetwork } = await import('./control/network.js');
    const { formatPlan } = await import('./control/network-plan.js');
    const config = requireConfig(path);
    if (clean) {
      const { commands } = await cleanNetwork(config.device.name);
      if (output === 'json') print(`${JSON.stringify({ commands }, null, 2)}\n`);
      else print(commands.length === 0 ? 'nothing of weir was left\n' : `${commands.join('\n')}\n`);
      return;
    }
    const plan = await describeNetwork(config);
    print(output === 'json' ? `${JSON.stringify(plan, null, 2)}\n` : formatPlan(plan));
  },

  async replay(options) {
    const { replay } = await import('./replay/replay.js');
    const summary = replay(options);
    const verdicts = Object.entries(summary.verdicts)
      .filter(([, packets]) => packets > 0)
      .map(([verdict, packets]) => `${verdict} ${packets}`);
    console.error(
      `${count(summary.packets, 'packet')} in ${summary.seconds.toFixed(3)} s, ${summary.emitted} out: ${verdicts.join(', ')}`,
    );
  },

  async maglev(name, { config: path, output }) {
    const [{ requireConfig }, { maglevTable }, { keyFromString }, { renderMaglev }] = await Promise.all([
      import('./config/load.js'),
      import('./balance/maglev.js'),
      import('./base/hash.js'),
      import('./cli/render.js'),
    ]);
    const config = requireConfig(path);
    const service = config.services.find((each) => each.name === name);
    if (service === undefined) {
      const names = config.services.map((each) => each.name).join(', ');
      throw new WeirError('USAGE', `there is no service ${name} in ${path}`, `It has ${names || 'none'}.`);
    }
    const key = keyFromString(config.seed);
    const size = config.maglev.tableSize;
    const backends = service.backends
      .filter(({ weight }) => weight > 0)
      .map(({ name, address, port, weight }) => ({ name, address: address.word, port, weight }));
    const table = maglevTable(backends, service.protocolNumber, size, key);
    const shares = backends.map(({ name, weight }, i) => {
      const slots = table.reduce((sum, owner) => sum + (owner === i ? 1 : 0), 0);
      const rest = backends.filter((_, j) => j !== i);
      const without = maglevTable(rest, service.protocolNumber, size, key);
      const disturbed = table.reduce((sum, owner, slot) => {
        if (owner === i || rest.length === 0) return sum;
        return sum + (backends[owner] === rest[without[slot]!] ? 0 : 1);
      }, 0);
      return { backend: name, weight, slots, share: slots / size, disturbed };
    });
    print(
      output === 'json'
        ? `${JSON.stringify({ service: name, size, backends: shares }, null, 2)}\n`
        : renderMaglev(shares, size),
    );
  },

  async ctList({ socket, output, ...filter }) {
    await callStream({ socket, path: '/v1/ct', query: { ...filterQuery(filter), format: output } }, print);
  },

  async ctStats({ socket, output }) {
    const { renderConntrackStats } = await import('./cli/render.js');
    show(await callJson<ConntrackStatsView>({ socket, path: '/v1/ct/stats' }), output, renderConntrackStats);
  },

  async ctFlush({ socket, all, ...filter }) {
    const query = filterQuery(filter);
    if (!all && Object.values(query).every((value) => value === undefined)) {
      throw new WeirError('USAGE', 'nothing says which connections to forget', 'Give a filter, or --all');
    }
    const { flushed } = await callJson<{ flushed: number }>({ socket, method: 'POST', path: '/v1/ct/flush', query });
    print(`${count(flushed, 'connection')} forgotten\n`);
  },

  async status({ socket, output }) {
    const { renderStatus } = await import('./cli/render.js');
    show(await callJson<StatusView>({ socket, path: '/v1/status' }), output, renderStatus);
  },

  async services({ socket, output }) {
    const { renderServices } = await import('./cli/render.js');
    show(await callJson<ServiceView[]>({ socket, path: '/v1/services' }), output, renderServices);
  },

  async reload({ socket }) {
    await callJson<ReloadView>({ socket, method: 'POST', path: '/v1/reload' });
    print('the new configuration is in force\n');
  },

  labUp: (options) => lab('up', options),
  labDemo: (options) => lab('demo', options),
  labDown: (options) => lab('down', options),
};

/** Runs the command line and ends the process. */
export async function main(argv: readonly string[]): Promise<void> {
  // `weir ct list | head` ends when head does.
  process.stdout.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code === 'EPIPE') process.exit(0);
    throw error;
  });
  const { version } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')) as {
    version: string;
  };
  process.exitCode = await runProgram(argv, version, actions);
}

/** Waits for whatever ends a run: a signal, or the data path. */
class Ending {
  #end: { resolve: (signal: string) => void; reject: (error: WeirError) => void } | undefined;
  #failure: WeirError | undefined;
  #signal: string | undefined;

  constructor() {
    for (const signal of ['SIGTERM', 'SIGINT'] as const) {
      process.on(signal, () => {
        this.#signal = signal;
        this.#end?.resolve(signal);
      });
    }
  }

  fail(error: WeirError): void {
    this.#failure = error;
    this.#end?.reject(error);
  }

  wait(): Promise<string> {
    if (this.#failure !== undefined) return Promise.reject(this.#failure);
    if (this.#signal !== undefined) return Promise.resolve(this.#signal);
    return new Promise((resolve, reject) => {
      this.#end = { resolve, reject };
    });
  }
}

async function lab(verb: 'up' | 'demo' | 'down', { prefix }: LabArguments): Promise<void> {
  const { labDemo, labDown, labUp } = await import('./lab/lab-commands.js');
  const verbs = { up: labUp, demo: labDemo, down: labDown };
  const code = await verbs[verb]({
    prefix,
    out: process.stdout,
    colour: process.stdout.isTTY === true && !process.env.NO_COLOR,
  });
  if (code !== 0) throw new Exit(code);
}

function filterQuery({
  service,
  backend,
  client,
  state,
}: Omit<FilterArguments, 'socket'>): Record<string, string | undefined> {
  return { service, backend, client, state };
}

function show<T>(value: T, format: string, render: (value: T) => string): void {
  print(format === 'json' ? `${JSON.stringify(value, null, 2)}\n` : render(value));
}

/** Writes, and waits when the reader is slower. */
function print(text: string): Promise<void> {
  return new Promise((resolve) => {
    if (process.stdout.write(text)) resolve();
    else process.stdout.once('drain', () => resolve());
  });
}

function count(n: number, noun: string): string {
  return `${n} ${noun}${n === 1 ? '' : 's'}`;
}
