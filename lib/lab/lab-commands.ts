import { showDemo } from './demo.js';
import { demoConfig } from './demo-config.js';
import { becomeAble, isInUserNamespace } from './privilege.js';
import { drawTopology, Screen } from './screen.js';
import { Lab, takeDown, VIP } from './topology.js';

/*
 *   weir lab demo    build -> traffic -> remove          in one process
 *   weir lab up      build -> (the lab stays, processes and all)
 *   weir lab down             remove
 *
 * In a user namespace a lab cannot outlive its command: there `up` stays until Ctrl-C.
 */

export interface LabCommandOptions {
  readonly out?: NodeJS.WritableStream;
  /** Default: on a terminal, unless NO_COLOR is set. */
  readonly colour?: boolean;
  readonly prefix?: string;
  /** The command line to run weir by; default: this installation's. */
  readonly weir?: readonly string[];
}

/**
 * Builds the lab, starts the servers and weir, and leaves them running.
 *
 * @returns the exit status
 * @throws WeirError LAB_FAILED, NO_PERMISSION, NO_TUN, MISSING_TOOL, USAGE
 */
export async function labUp(options: LabCommandOptions = {}): Promise<number> {
  const elsewhere = await becomeAble();
  if (elsewhere !== null) return elsewhere;
  const screen = screenOf(options);
  const lab = await Lab.create(options);
  try {
    await screen.during('starting servers and weir', lab.startServers());
    const weir = await lab.startWeir(demoConfig());
    drawTopology(screen, lab.prefix);
    const prefix = isInUserNamespace() ? `nsenter -t ${process.pid} -U -n -m --preserve-credentials ` : '';
    const client = `${prefix}ip netns exec ${lab.namespace('client')}`;
    screen.heading('Try');
    screen.line(`  ${client} curl -s http://${VIP}/`);
    screen.line(`  ${prefix}weir ct list --socket ${weir.socket}`);
    screen.line(`  edit ${weir.configPath}, then ${prefix}weir reload --socket ${weir.socket}`);
    screen.line();
    if (isInUserNamespace()) {
      screen.line('  The lab is there until Ctrl-C.');
      await weir.ended;
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
  const elsewhere = await becomeAble();
  if (elsewhere !== null) return elsewhere;
  const screen = screenOf(options);
  const startedMs = performance.now();
  drawTopology(screen, options.prefix ?? 'weir');
  const lab = await screen.during('building the lab', Lab.create(options));
  try {
    await showDemo(lab, screen, startedMs);
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

function screenOf({ out = process.stdout, colour }: LabCommandOptions): Screen {
  return new Screen({ out, ...(colour === undefined ? {} : { colour }) });
}
