import { Command, CommanderError, InvalidArgumentError, Option } from 'commander';
import { WeirError } from '../base/errors.js';

/** What the commands do; the composition root hands it in, so that each loads only what it needs. */
export interface Actions {
  run(options: { config: string; socket?: string; pretty?: boolean }): Promise<void>;
  check(options: { config: string; output: 'text' | 'json' }): Promise<void>;
  net(options: { config: string; clean?: boolean; output: 'text' | 'json' }): Promise<void>;
  replay(options: ReplayArguments): Promise<void>;
  maglev(service: string, options: { config: string; output: 'table' | 'json' }): Promise<void>;
  ctList(options: FilterArguments & { output: string }): Promise<void>;
  ctStats(options: SocketArguments & { output: 'table' | 'json' }): Promise<void>;
  ctFlush(options: FilterArguments & { all?: boolean }): Promise<void>;
  status(options: SocketArguments & { output: 'table' | 'json' }): Promise<void>;
  services(options: SocketArguments & { output: 'table' | 'json' }): Promise<void>;
  reload(options: SocketArguments): Promise<void>;
  labUp(options: LabArguments): Promise<void>;
  labDemo(options: LabArguments): Promise<void>;
  labDown(options: LabArguments): Promise<void>;
}

export interface SocketArguments {
  readonly socket: string;
}

export interface FilterArguments extends SocketArguments {
  readonly service?: string;
  readonly backend?: string;
  readonly client?: string;
  readonly state?: string;
}

export interface ReplayArguments {
  readonly config: string;
  readonly in: string;
  readonly out: string;
  readonly json: string;
  readonly conntrack?: string;
  readonly timeline?: string;
  readonly seed?: number;
  readonly recovering?: boolean;
}

export interface LabArguments {
  readonly prefix: string;
}

/** Thrown by an action that has said all there is to say, to end with a code of its own. */
export class Exit extends Error {
  readonly code: number;

  constructor(code: number) {
    super(`exit ${code}`);
    this.code = code;
  }
}

const DEFAULT_SOCKET = '/run/weir/weir.sock';

/**
 * Parses the command line and runs what it names.
 *
 * @returns the exit code: 0 only on success; 2 for a command line or a configuration with mistakes, 1 for all else.
 */
export async function runProgram(argv: readonly string[], version: string, actions: Actions): Promise<number> {
  try {
    await createProgram(version, actions).parseAsync([...argv]);
    return 0;
  } catch (error) {
    if (error instanceof Exit) return error.code;
    if (error instanceof CommanderError) return error.exitCode === 0 ? 0 : 2;
    return report(error);
  }
}

/** One sentence and the remedy; a stack only for who asks with WEIR_DEBUG. */
function report(error: unknown): number {
  if (!(error instanceof WeirError)) {
    console.error(
      `weir: ${error instanceof Error ? error.message : String(error)}. This is a bug in weir; please report it.`,
    );
    if (process.env.WEIR_DEBUG) console.error(error);
    return 1;
  }
  // A configuration's mistakes are lines to jump to, not a sentence.
  if (error.code === 'CONFIG_INVALID') console.error(error.message);
  else console.error(`weir: ${error.message}.${error.remedy ? ` ${sentence(error.remedy)}` : ''}`);
  if (process.env.WEIR_DEBUG) console.error(error);
  return error.code === 'CONFIG_INVALID' || error.code === 'USAGE' ? 2 : 1;
}

function sentence(text: string): string {
  const capital = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?)]$/.test(capital) ? capital : `${capital}.`;
}

function createProgram(version: string, actions: Actions): Command {
  const program = new Command('weir')
    .description('A userspace L4 load balancer with its own connection tracking.')
    .version(version)
    .exitOverride()
    .showHelpAfterError('(--help shows what is possible)')
    .addHelpText(
      'after',
      '\nExamples:\n  weir check -c weir.yaml\n  weir run -c weir.yaml\n  weir ct list -o cilium --service web',
    );
  const command = (parent: Command, name: string, description: string, example: string): Command =>
    parent.command(name).description(description).addHelpText('after', `\nExample:\n  ${example}`).exitOverride();

  command(program, 'run', 'Balance packets until SIGTERM. SIGHUP reloads the file.', 'weir run -c /etc/weir/weir.yaml')
    .requiredOption('-c, --config <file>', 'the configuration')
    .option('--socket <path>', 'admin socket, instead of the one in the file')
    .option('--pretty', 'log text instead of JSON (the default on a terminal)')
    .action((options) => actions.run(options));

  command(program, 'check', 'Judge a configuration; lists every mistake with its position.', 'weir check -c weir.yaml')
    .requiredOption('-c, --config <file>', 'the configuration')
    .addOption(output(['text', 'json']))
    .action((options) => actions.check(options));

  command(program, 'net', 'Print the ip and sysctl commands `run` executes.', 'weir net -c weir.yaml')
    .requiredOption('-c, --config <file>', 'the configuration')
    .option('--clean', 'instead remove what a weir that was killed left in the kernel')
    .addOption(output(['text', 'json']))
    .action((options) => actions.net(options));

  command(
    program,
    'replay',
    'Run a capture through the same pipeline, with its timestamps as the clock. Needs no root and no device.',
    'weir replay -c weir.yaml --in in.pcap --out out.pcap --json out.jsonl',
  )
    .requiredOption('-c, --config <file>', 'the configuration')
    .requiredOption('--in <pcap>', 'pcap or pcapng to read')
    .requiredOption('--out <pcap>', 'packets that leave weir')
    .requiredOption('--json <jsonl>', 'one line per packet: verdict, reason, flow, bytes out')
    .option('--conntrack <json>', 'the connections at the end, as `weir ct list -o json` prints them')
    .option('--timeline <jsonl>', 'reloads, health changes and the end, by time')
    .option('--seed <n>', 'seed of the lots drawn and of the table secret', integer, 1)
    .option('--recovering', 'begin as after a start without a table')
    .action((options) => actions.replay(options));

  command(program, 'maglev', 'Show who owns how much of a service’s Maglev table.', 'weir maglev -c weir.yaml web')
    .argument('<service>', 'name of a service')
    .requiredOption('-c, --config <file>', 'the configuration')
    .addOption(output(['table', 'json']))
    .action((service, options) => actions.maglev(service, options));

  const ct = command(program, 'ct', 'Look at the connections of a running weir.', 'weir ct list --state ESTABLISHED');
  withFilter(command(ct, 'list', 'List connections.', 'weir ct list --client 10.1.0.0/24 -o cilium'))
    .addOption(output(['table', 'json', 'cilium', 'conntrack']))
    .action((options) => actions.ctList(options));
  withSocket(
    command(ct, 'stats', 'Show how full the tables are and what was dropped, by reason.', 'weir ct stats -o json'),
  )
    .addOption(output(['table', 'json']))
    .action((options) => actions.ctStats(options));
  withFilter(command(ct, 'flush', 'Forget connections.', 'weir ct flush --backend web/b1'))
    .option('--all', 'every connection: needed when no filter is given')
    .action((options) => actions.ctFlush(options));

  withSocket(command(program, 'status', 'Show a running weir: device, configuration, services.', 'weir status -o json'))
    .addOption(output(['table', 'json']))
    .action((options) => actions.status(options));
  withSocket(command(program, 'services', 'List services and backends with what they did.', 'weir services'))
    .addOption(output(['table', 'json']))
    .action((options) => actions.services(options));
  withSocket(command(program, 'reload', 'Have a running weir read its file again.', 'weir reload')).action((options) =>
    actions.reload(options),
  );

  const lab = command(program, 'lab', 'A lab of network namespaces: client, gateway, three backends.', 'weir lab demo');
  for (const [name, description, action] of [
    ['up', 'Build the lab and run weir in it until Ctrl-C.', 'labUp'],
    ['demo', 'Build it, send traffic, show what happens, clean up. Takes under a minute.', 'labDemo'],
    ['down', 'Remove a lab that was left behind.', 'labDown'],
  ] as const) {
    command(lab, name, description, `weir lab ${name}`)
      .option('--prefix <name>', 'prefix of the namespaces', 'weir')
      .action((options) => actions[action](options));
  }
  return program;
}

function output(choices: string[]): Option {
  return new Option('-o, --output <format>', 'how to print').choices(choices).default(choices[0]);
}

function withSocket(command: Command): Command {
  return command.addOption(new Option('--socket <path>', 'admin socket').env('WEIR_SOCKET').default(DEFAULT_SOCKET));
}

function withFilter(command: Command): Command {
  return withSocket(command)
    .option('--service <name>', 'only of this service')
    .option('--backend <name>', 'only to this backend: name, service/name, address or address:port')
    .option('--client <address>', 'only of this client: address, address:port or prefix')
    .option('--state <state>', 'only in this state');
}

function integer(text: string): number {
  if (!/^-?\d{1,10}$/.test(text)) throw new InvalidArgumentError('It is not an integer.');
  return Number(text);
}
