import { WeirError } from '../base/errors.js';
import { checkCapture, type Recording, record } from './capture.js';
import { showDemo } from './demo.js';
import type { Mode } from './demo-config.js';
import { showDsrDemo } from './demo-dsr.js';
import { showFailover } from './demo-failover.js';
import { drawTopology } from './drawing.js';
import { becomeAble, isInUserNamespace } from './privilege.js';
import { Screen } from './screen.js';
import { Lab, type LabOptions, takeDown, VIP } from './topology.js';
import { startWeirs, type Weirs } from './weirs.js';

/*
 *   weir lab demo    build -> traffic -> remove          in one process
 *   weir lab up      build -> (the lab stays, processes and all)
 *   weir lab down             remove
 *
 *   --mode dnat, snat      shape inline: answers come back through the gateway
 *   --mode dsr             shape one-arm: they go past it
 *   --failover             the same with a second gateway
 *
 * In a user namespace a lab cannot outlive its command: there `up` stays until Ctrl-C.
 */

const DOWNLOADS = 100;

export interface LabCommandOptions {
  readonly out?: NodeJS.WritableStream;
  /** Default: on a terminal, unless NO_COLOR is set. */
  readonly colour?: boolean;
  readonly prefix?: string;
  /** The command line to run weir by; default: this installation's. */
  readonly weir?: readonly string[];
  /** Default: dnat, with `failover` dsr. */
  readonly mode?: Mode;
  /** A folder for captures of every link. */
  readonly pcap?: string;
  /** Show how a second gateway goes on with the first one's connections. */
  readonly failover?: boolean;
  /** That run then; 100. */
  readonly downloads?: number;
}

/**
 * Builds the lab, starts the servers and weir, and leaves them running.
 *
 * @returns the exit status
 * @throws WeirError LAB_FAILED, NO_PERMISSION, NO_TUN, MISSING_TOOL, USAGE
 */
export async function labUp(options: LabCommandOptions = {}): Promise<number> {
  const mode = modeOf(options);
  const elsewhere = await becomeAble();
  if (elsewhere !== null) return elsewhere;
  if (options.pcap !== undefined) await checkCapture();
  const screen = screenOf(options);
  const lab = await Lab.create(labOptions(options));
  try {
    const recording = options.pcap === undefined ? undefined : await record(lab, options.pcap);
    await screen.during('starting the servers', lab.startServers());
    const weirs = await screen.during('starting weir', startWeirs(lab, mode));
    drawTopology(screen, lab.prefix, lab.plan);
    suggest(lab, weirs, recording, screen);
    if (isInUserNamespace()) {
      screen.line('  The lab is there until Ctrl-C.');
      await Promise.race([...weirs.gateways, ...weirs.nodes].map(({ ended }) => ended));
      screen.check(false, 'weir has ended by itself');
      await lab.destroy();
      return 1;
    }
    screen.line(`  weir lab down${lab.prefix === 'weir' ? '' : ` --prefix ${lab.prefix}`} removes it all`);
    lab.release();
    return 0;
  } catch (error) {
    await lab.destroy();
    throw error;
  }
}

function suggest(lab: Lab, { gateways, nodes }: Weirs, recording: Recording | undefined, screen: Screen): void {
  const prefix = isInUserNamespace() ? `nsenter -t ${process.pid} -U -n -m --preserve-credentials ` : '';
  const inside = (role: string): string => `${prefix}ip netns exec ${lab.namespace(role)}`;
  const gateway = gateways[0]!;
  const suggestions: (readonly [command: string, note?: string])[] = [
    [`${inside('client')} curl -s http://${VIP}/`],
    [`export WEIR_SOCKET=${gateway.socket}`, 'or --socket with each command; in a checkout it is npx weir'],
    [`${prefix}weir ct list`, nodes.length === 0 ? 'what curl has left, for 10 s' : 'one way only: type SVC'],
  ];
  if (nodes.length > 0) {
    suggestions.push(
      [`${prefix}weir ct list --socket ${nodes[0]!.socket}`, 'of a node: both ways, type OUT, DSR'],
      [`${inside('client')} curl -so /dev/null http://${VIP}/bytes/1000000000`],
      [`${inside('router')} ip -s -h link`, 'client has got it all, gw next to nothing'],
      [`${inside('gw')} tcpdump -ni eth0 src ${VIP}`, 'no answers'],
    );
  }
  if (recording !== undefined) {
    const { files } = recording;
    suggestions.push([`tcpdump -nr ${files[0]}`, `and ${files.length - 1} more, one a link: all is being recorded`]);
  }
  screen.heading('Try');
  for (const [command, note] of suggestions) {
    screen.line(`  ${command}${note === undefined ? '' : screen.dim(`   # ${note}`)}`);
  }
  screen.line(`  edit ${gateway.configPath}: weir reads it when it changes; ${prefix}weir events -f tells`);
  screen.line(screen.dim('  docs/tutorial.md goes on from here'));
  screen.line();
}

/**
 * Removes a lab that `labUp` built or a killed demo left.
 *
 * @returns the exit status: 0 also when there was none
 * @throws WeirError as labUp
 */
export async function labDown(options: LabCommandOptions = {}): Promise<number> {
  const screen = screenOf(options);
  screen.line(takeDown(options.prefix) ? 'The lab is gone.' : 'There is no lab to remove.');
  return 0;
}

/**
 * The demo: builds the lab, sends traffic, shows what happens, removes everything. About 20 seconds.
 *
 * @returns the exit status: 1 when a check failed
 * @throws WeirError as labUp
 */
export async function labDemo(options: LabCommandOptions = {}): Promise<number> {
  const mode = modeOf(options);
  const elsewhere = await becomeAble();
  if (elsewhere !== null) return elsewhere;
  if (options.pcap !== undefined) await checkCapture();
  const screen = screenOf(options);
  const startedMs = performance.now();
  const lab = await screen.during('building the lab', Lab.create(labOptions(options)));
  try {
    drawTopology(screen, lab.prefix, lab.plan);
    const recording = options.pcap === undefined ? undefined : await record(lab, options.pcap);
    if (options.failover) await showFailover(lab, { downloads: options.downloads ?? DOWNLOADS }, screen, startedMs);
    else if (mode === 'dsr') await showDsrDemo(lab, screen, startedMs);
    else await showDemo(lab, mode, screen, startedMs);
    if (recording !== undefined) await sayRecorded(recording, screen);
  } finally {
    await lab.destroy();
  }
  const seconds = ((performance.now() - startedMs) / 1000).toFixed(1);
  screen.line();
  const { failures } = screen;
  if (failures > 0) screen.check(false, `${failures} check${failures === 1 ? '' : 's'} failed (${seconds} s)`);
  else screen.line(`  Everything as it should be, and the lab is gone. ${screen.dim(`${seconds} s`)}`);
  return failures > 0 ? 1 : 0;
}

async function sayRecorded(recording: Recording, screen: Screen): Promise<void> {
  screen.heading('Recorded');
  const { packets, missed, bytes } = await screen.during('waiting for the last packets', recording.stop());
  for (const file of recording.files) screen.line(`  ${file}`);
  const notes = `${missed === 0 ? 'none' : missed.toLocaleString('en')} missed, ${(bytes / 1e6).toFixed(1)} MB`;
  screen.line(`  ${packets.toLocaleString('en')} packets, the first 256 bytes of each; ${notes}`);
}

/** @throws WeirError USAGE */
function modeOf({ mode, failover, downloads }: LabCommandOptions): Mode {
  if (failover && mode !== undefined && mode !== 'dsr') {
    throw new WeirError(
      'USAGE',
      `--failover is for --mode dsr, not ${mode}`,
      'In the other modes a second gateway has to be given the connections: weir ct export, weir ct import.',
    );
  }
  if (downloads !== undefined && !failover) throw new WeirError('USAGE', '--downloads is for --failover');
  return mode ?? (failover ? 'dsr' : 'dnat');
}

function labOptions(options: LabCommandOptions): LabOptions {
  const { prefix, weir, failover } = options;
  const shape = modeOf(options) === 'dsr' ? 'one-arm' : 'inline';
  return {
    shape,
    gateways: failover ? 2 : 1,
    ...(prefix === undefined ? {} : { prefix }),
    ...(weir === undefined ? {} : { weir }),
  };
}

function screenOf({ out = process.stdout, colour }: LabCommandOptions): Screen {
  return new Screen({ out, ...(colour === undefined ? {} : { colour }) });
}
