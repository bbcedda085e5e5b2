import { Argument, Command, InvalidArgumentError, Option } from 'commander';
import { plural } from '../control/summary.js';
import { completionScript, NAMES_COMMAND, SHELLS, type Shell } from './completion.js';
import type { Rules } from './export.js';
import { addHelp, HELP } from './help.js';
import { report } from './report.js';
import { SORTS } from './top-frame.js';

/** What this folder may not reach by itself; the composition root hands it in. */
export interface Parts {
  readonly version: string;
  /** Returns the exit code. */
  run(request: RunRequest): Promise<number>;
  replay(request: ReplayRequest): Promise<ReplayOutcome>;
  /** Returns the exit code. */
  lab(verb: 'up' | 'demo' | 'down', request: LabRequest): Promise<number>;
}

export interface RunRequest {
  readonly config: string;
  readonly socket?: string;
  readonly pretty: boolean;
}

export interface ReplayRequest {
  readonly config: string;
  readonly in: string;
  readonly out: string;
  readonly json: string;
  readonly conntrack?: string;
  readonly timeline?: string;
  readonly seed?: number;
  readonly recovering?: boolean;
}

export interface ReplayOutcome {
  readonly packets: number;
  readonly emitted: number;
  readonly seconds: number;
  readonly verdicts: Readonly<Record<string, number>>;
}

export interface LabRequest {
  readonly prefix: string;
  /** What absent ones mean is for the lab to say. */
  readonly mode?: 'dnat' | 'snat' | 'dsr';
  readonly pcap?: string;
  readonly failover?: boolean;
  readonly downloads?: number;
}

const DEFAULT_SOCKET = '/run/weir/weir.sock';

/**
 * Parses the command line and runs what it names.
 *
 * @returns the exit code: 0 only on success; 2 for a command line or a configuration with mistakes, 1 for all else.
 */
export async function runProgram(argv: readonly string[], parts: Parts): Promise<number> {
  let code = 0;
  const program = createProgram(parts, (result) => {
    code = result;
  });
  try {
    await program.parseAsync([...argv]);
    return code;
  } catch (error) {
    return report(error);
  }
}

/** Commands are imported when they are called: `weir check` must not wait for what `weir run` needs. */
function createProgram(parts: Parts, exit: (code: number) => void): Command {
  const program = new Command('weir')
    .description('A userspace L4 load balancer with its own connection tracking.')
    .version(parts.version)
    .configureHelp(HELP)
    .addHelpText(
      'after',
      '\nExamples:\n  weir check -c weir.yaml\n  weir run -c weir.yaml\n  weir ct list -o cilium --service web',
    );
  settle(program);
  addFileCommands(program, parts, exit);
  addRunningCommands(program);
  addForesight(program);
  addBridges(program);
  addLabCommands(program, parts, exit);
  command(program, 'completion', 'Print a script that completes commands and options in a shell.', 'completion bash')
    .addHelpText(
      'after',
      '\n  source <(weir completion bash)          # in ~/.bashrc; or zsh, in ~/.zshrc\n  weir completion fish | source           # in ~/.config/fish/config.fish',
    )
    .addArgument(new Argument('<shell>', 'the shell').choices(SHELLS))
    .action(async (shell: Shell) => (await import('./output.js')).print(completionScript(program, shell)));
  settle(program.command(NAMES_COMMAND, { hidden: true }).argument('[words...]')).action(async (words: string[]) => {
    const names = await (await import('./complete-names.js')).completeNames(program, words);
    await (await import('./output.js')).print(names.map((name) => `${name}\n`).join(''));
  });
  addHelp(program);
  return program;
}

function addFileCommands(program: Command, parts: Parts, exit: (code: number) => void): void {
  withConfig(command(program, 'run', 'Balance packets until SIGTERM; SIGHUP reads the file again.', 'run -c weir.yaml'))
    .addOption(new Option('--socket <path>', 'admin socket, instead of the one in the file').env('WEIR_SOCKET'))
    .option('--pretty', 'log for people instead of JSON lines (the default on a terminal)')
    .action(async ({ pretty = process.stdout.isTTY === true, ...options }) =>
      exit(await parts.run({ ...options, pretty })),
    );

  withConfig(
    command(program, 'check', 'Judge a configuration: every mistake, with its position.', 'check -c weir.yaml'),
  )
    .addOption(output(['text', 'json']))
    .action(async (options) => (await import('./check.js')).check(options));

  withConfig(command(program, 'net', 'Print the ip and sysctl commands that `run` executes.', 'net -c weir.yaml'))
    .option('--clean', 'remove what a killed weir left in the kernel, blackholes included')
    .addOption(output(['text', 'json']))
    .action(async (options) => (await import('./net.js')).net(options));

  withConfig(
    command(
      program,
      'replay',
      'Run a capture through the same pipeline, with its timestamps as the clock. Needs neither root nor a device.',
      'replay -c weir.yaml --in in.pcap --out out.pcap --json out.jsonl',
    ),
  )
    .requiredOption('--in <pcap>', 'pcap or pcapng to read')
    .requiredOption('--out <pcap>', 'packets that leave weir')
    .requiredOption('--json <jsonl>', 'a line per packet: verdict, reason, flow, bytes out')
    .option('--conntrack <json>', 'the connections at the end, as `weir ct list -o json` prints them')
    .option('--timeline <jsonl>', 'configurations, health changes and the end, by time')
    .option('--seed <n>', 'seed of the lots drawn and of the table’s secret', parseSeed, 1)
    .option('--recovering', 'begin as after a start without a table')
    .action(async (options) => console.error(sayReplay(await parts.replay(options))));

  withConfig(
    command(program, 'maglev', 'Show who owns how much of a service’s Maglev table.', 'maglev -c weir.yaml web'),
  )
    .argument('<service>', 'name of a service')
    .addOption(output(['table', 'json']))
    .action(async (service, options) => (await import('./maglev.js')).maglev(service, options));
}

function addRunningCommands(program: Command): void {
  const running = () => import('./running.js');
  const table = (): Option => output(['table', 'json']);
  withSocket(command(program, 'status', 'Show a running weir: device, configuration, services.', 'status -o json'))
    .addOption(table())
    .action(async (options) => (await running()).status(options));
  withSocket(command(program, 'services', 'List services and backends, with what they carry.', 'services'))
    .addOption(table())
    .action(async (options) => (await running()).services(options));
  withSocket(
    command(
      program,
      'top',
      'Show what goes on, once a second: rates, backends, conntrack, drops, clients. Keys: q quits, ? shows the others.',
      'top --sort bits\n  weir top --service web -o json',
    ),
  )
    .option('--once', 'print one frame and end (the default where no terminal is)')
    .option('--service <name>', 'only services with this in their name')
    .addOption(new Option('--sort <figure>', 'what comes first').choices(SORTS).default(SORTS[0]))
    .addOption(table())
    .action(async (options) => (await import('./top.js')).top(options));
  withSocket(command(program, 'metrics', 'Print what Prometheus would scrape: docs/metrics.md.', 'metrics')).action(
    async (options) => (await running()).metrics(options),
  );
  withSocket(command(program, 'events', 'Print what a running weir logged lately: docs/logs.md.', 'events -f'))
    .option('-f, --follow', 'go on with what it logs from now on')
    .option('-n, --count <n>', 'how many of the last lines (default: all there are, up to 1000)', parseCount)
    .addOption(table())
    .action(async (options) => (await import('./events.js')).events(options));
  withSocket(
    command(
      program,
      'capture',
      'Record packets as weir receives and sends them, with what it decided, as a pcapng file.',
      'capture --service web --client 10.1.0.2 -w web.pcapng',
    ),
  )
    .requiredOption('-w, --write <file>', 'pcapng to write; - for standard output (`| wireshark -k -i -`)')
    .option('--service <name>', 'only of this service')
    .option('--backend <name>', 'only to this backend: name, service/name, address or address:port')
    .option('--client <address>', 'only from and to this client: address, address:port or prefix')
    .option('--count <n>', 'end after so many packets in', parseCount)
    .option('--seconds <s>', 'end after so long', parseCount)
    .option('--snaplen <bytes>', 'the most to keep of a packet (default: all of it)', parseCount)
    .action(async (options) => (await import('./capture.js')).capture(options));
  for (const [name, description] of [
    [
      'drain',
      'Take new connections from a backend; those it has go on. Lasts until the file says something else of it.',
    ],
    ['undrain', 'End a drain by command.'],
  ] as const) {
    withSocket(command(program, name, description, `${name} web b1`))
      .argument('<service>', 'name of the service')
      .argument('<backend>', 'its name, address or address:port')
      .addOption(table())
      .action(async (service, backend, options) => (await running()).drain(name, service, backend, options));
  }
  withSocket(command(program, 'reload', 'Have a running weir read its file again.', 'reload'))
    .addOption(table())
    .action(async (options) => (await running()).reload(options));

  const ct = command(program, 'ct', 'Look into the connection table of a running weir.', 'ct list --state ESTABLISHED');
  withFilter(command(ct, 'list', 'List connections.', 'ct list --client 10.1.0.0/24 -o cilium'))
    .addOption(output(['table', 'json', 'cilium', 'conntrack']))
    .action(async (options) => (await running()).ctList(options));
  withFilter(command(ct, 'watch', 'Print what happens to connections, as it happens.', 'ct watch --service web'))
    .option('--count <n>', 'end after so many events', parseCount)
    .addOption(table())
    .action(async (options) => (await import('./watch.js')).ctWatch(options));
  withSocket(command(ct, 'stats', 'Show how full the tables are, and drops by reason.', 'ct stats -o json'))
    .addOption(table())
    .action(async (options) => (await running()).ctStats(options));
  const transfer = () => import('./transfer.js');
  withFilter(
    command(
      ct,
      'export',
      'Write connections as JSON lines, for `ct import` on another host.',
      'ct export | ssh other weir ct import -',
    ),
  ).action(async (options) => (await transfer()).ctExport(options));
  withSocket(
    command(ct, 'import', 'Take over connections that `ct export` wrote on another host.', 'ct import flows.jsonl'),
  )
    .argument('<file>', 'what `ct export` wrote; - for standard input')
    .addOption(table())
    .action(async (file, options) => (await transfer()).ctImport(file, options));
  withFilter(command(ct, 'flush', 'Forget connections: their next packets are unknown.', 'ct flush --backend web/b1'))
    .option('--all', 'every connection; needed when there is no filter')
    .addOption(table())
    .action(async (options) => (await running()).ctFlush(options));
}

/** What would happen, and does not. */
function addForesight(program: Command): void {
  command(
    program,
    'doctor',
    'Say what on this host keeps weir from starting or its packets from passing, and how to mend it; changes nothing.',
    'doctor -c weir.yaml',
  )
    .option('-c, --config <file>', 'the configuration; without it, only what does not depend on one is looked at')
    .addOption(output(['text', 'json']))
    .action(async (options) => (await import('./doctor.js')).doctor(options));

  withSocket(
    withConfig(
      command(
        program,
        'plan',
        'Show what a reload of a file would change; changes nothing. Exits with 3 when there is something, else with 0.',
        'plan -c new.yaml',
      ),
    ),
  )
    .option('--from <file>', 'compare with this file instead of with a running weir')
    .addOption(output(['table', 'json']))
    .action(async (options) => (await import('./plan.js')).plan(options));

  const list = (each: string, before: string[]): string[] => [...before, each];
  withSocket(
    command(
      program,
      'explain',
      'Show what would become of a packet, and why; nothing is sent.',
      'explain tcp 10.1.0.2:40000 10.96.0.10:80\n  weir explain tcp 10.1.0.2:40000 10.96.0.10:80 --flags ack --without web/b1' +
        '\n  weir explain -c weir.yaml udp 10.1.0.2:5353 10.96.0.10:53',
    ),
  )
    .argument('[proto]', 'tcp, udp, or icmp (an echo request, whose ends have no ports)')
    .argument('[source]', 'ADDRESS:PORT')
    .argument('[destination]', 'ADDRESS:PORT')
    .option('--flags <names>', 'of tcp, with commas: syn (the default), ack, fin, rst, psh, urg, ece, cwr, none')
    .option('--packet <hex>', 'instead of its ends: the packet from its IP header on')
    .option('--without <backend>', 'as if SERVICE/BACKEND had left the file; may be repeated', list, [])
    .option('--assume-down <backend>', 'as if the check of SERVICE/BACKEND failed; may be repeated', list, [])
    .option('-c, --config <file>', 'by this file and with an empty table, instead of by a running weir')
    .addOption(output(['table', 'json']))
    .action(async (proto, source, destination, options) =>
      (await import('./explain.js')).explain([proto, source, destination], options),
    );
}

/** To and from what others use in weir's place. */
function addBridges(program: Command): void {
  withConfig(
    command(
      program,
      'export',
      'Print a configuration as rules of the kernel: docs/export-import.md.',
      'export iptables -c weir.yaml | iptables-restore --noflush\n  weir export nft -c weir.yaml | nft -f -',
    ),
  )
    .addArgument(new Argument('<rules>', 'whose rules').choices(['iptables', 'nft']))
    .action(async (rules: Rules, options) => (await import('./export.js')).exportRules(rules, options));

  const imports = command(
    program,
    'import',
    'Make a configuration of what others have: docs/export-import.md.',
    'import kubernetes manifests/ -O weir.yaml',
  );
  const into = (parent: Command): Command =>
    parent
      .option('--base <file>', 'a configuration whose other sections are kept; its services are replaced')
      .option('-O, --out <file>', 'write this file, in one step, instead of standard output')
      .option('--strict', 'write nothing and exit with 1 when something cannot be kept')
      .option('--allow-empty', 'write a configuration without services too: else that is a mistake');
  const kubernetes = command(
    imports,
    'kubernetes',
    'Make a configuration of Services and EndpointSlices, YAML or JSON.',
    'import kubernetes manifests/ --base base.yaml -O weir.yaml --watch' +
      '\n  kubectl get services,endpointslices -A -o yaml | weir import kubernetes -',
  );
  into(kubernetes)
    .argument('<files...>', 'manifests, folders of them, or - for standard input')
    .option('--node <name>', 'where a traffic policy is Local: endpoints of this node only')
    .option('--watch', 'keep the file named by -O in step with the manifests, until SIGTERM')
    .action(async (files, options) => (await import('./import.js')).kubernetes(files, options));
  into(
    command(
      imports,
      'ipvs',
      'Make a configuration of what `ipvsadm -S -n` prints.',
      'import ipvs rules.txt -O weir.yaml',
    ),
  )
    .argument('<file>', 'its output; - for standard input')
    .action(async (file, options) => (await import('./import.js')).ipvs(file, options));
}

function addLabCommands(program: Command, parts: Parts, exit: (code: number) => void): void {
  const lab = command(program, 'lab', 'A lab of network namespaces: client, gateway, three backends.', 'lab demo');
  const verb = (name: 'up' | 'demo' | 'down', description: string, example: string): Command =>
    command(lab, name, description, example)
      .option('--prefix <name>', 'what the names of the namespaces begin with', 'weir')
      .action(async (options) => exit(await parts.lab(name, options)));
  const withMode = (parent: Command): Command =>
    parent
      .addOption(
        new Option('--mode <mode>', 'of the services; with dsr, answers go past the gateway')
          .choices(['dnat', 'snat', 'dsr'])
          .default(undefined, 'dnat'),
      )
      .option('--pcap <dir>', 'record every link of the lab there, with tcpdump');
  withMode(verb('up', 'Build the lab, with weir running in it.', 'lab up --mode dsr'));
  withMode(
    verb(
      'demo',
      'Build it, send traffic, show what happens, remove it. Takes under a minute.',
      'lab demo --mode dsr --pcap /tmp/links',
    ),
  )
    .option('--failover', 'mode dsr with two gateways, one of which is killed while downloads run')
    .option('--downloads <n>', 'how many run then (default: 100)', parseCount);
  verb('down', 'Remove the lab.', 'lab down');
}

function command(parent: Command, name: string, description: string, example: string): Command {
  return settle(parent.command(name).description(description).addHelpText('after', `\nExample:\n  weir ${example}`));
}

/** Errors are thrown, and printed as all others are. */
function settle(command: Command): Command {
  return command.exitOverride().configureOutput({
    outputError: (text, write) => {
      const message = text
        .trim()
        .replace(/^error: /, '')
        .replace(/\n/g, ' ')
        .replace(/\.$/, '');
      write(`weir: ${message}. See \`${fullName(command)} --help\`.\n`);
    },
  });
}

function fullName(command: Command): string {
  return command.parent === null ? command.name() : `${fullName(command.parent)} ${command.name()}`;
}

function withConfig(command: Command): Command {
  return command.requiredOption('-c, --config <file>', 'the configuration');
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

function output(choices: string[]): Option {
  return new Option('-o, --output <format>', 'how to print').choices(choices).default(choices[0]);
}

function parseSeed(text: string): number {
  if (!/^-?\d{1,10}$/.test(text)) throw new InvalidArgumentError('It is no integer.');
  return Number(text);
}

function parseCount(text: string): number {
  if (!/^[1-9]\d{0,14}$/.test(text)) throw new InvalidArgumentError('It is no number from 1 on.');
  return Number(text);
}

function sayReplay({ packets, emitted, seconds, verdicts }: ReplayOutcome): string {
  const parts = Object.entries(verdicts).filter(([, count]) => count > 0);
  const split = parts.map(([verdict, count]) => `${verdict} ${count}`).join(', ');
  return `${plural(packets, 'packet')} in ${seconds.toFixed(3)} s, ${emitted} out${split === '' ? '' : `: ${split}`}`;
}
