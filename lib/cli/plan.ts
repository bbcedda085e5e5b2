import { Readable } from 'node:stream';
import { WeirError } from '../base/errors.js';
import { readConfigText, requireConfig } from '../config/load.js';
import type { BackendPlan, Change, FieldChange, FlowFates, PlanView, ServicePlan } from '../control/plan/plan-view.js';
import { nameAndAddress, plural } from '../control/summary.js';
import { callJson } from './client.js';
import { print, printJson } from './output.js';
import { Exit, report } from './report.js';
import type { SocketOptions } from './running.js';

export interface PlanOptions extends SocketOptions {
  readonly config: string;
  /** Another file to compare with, instead of what a running weir has in use. */
  readonly from?: string;
  readonly output: 'table' | 'json';
}

/** The exit code when a reload would change something. */
const CHANGES = 3;

/** `weir plan`: exits with 0 when a reload would change nothing, with 1 when it would be refused. */
export async function plan({ socket, config: path, from, output }: PlanOptions): Promise<void> {
  const view = await (from === undefined ? planRunning(socket, path) : planFrom(from, path));
  await (output === 'json' ? printJson(view) : print(renderPlan(view)));
  const { refusal } = view;
  if (refusal !== null) throw new Exit(report(new WeirError('NOT_SUPPORTED', refusal.message, refusal.remedy)));
  if (view.changes) throw new Exit(CHANGES);
}

/** The file is judged here first: its mistakes are those that `weir check` tells, whatever version answers. */
async function planRunning(socket: string, path: string): Promise<PlanView> {
  const text = readConfigText(path);
  requireConfig(path, text);
  const body = Readable.from([Buffer.from(text)]);
  return callJson<PlanView>({ socket, method: 'POST', path: '/v1/plan', query: { name: path }, body });
}

async function planFrom(from: string, path: string): Promise<PlanView> {
  const [before, after] = [requireConfig(from), requireConfig(path)];
  const { compareFiles } = await import('../control/plan/plan.js');
  return compareFiles(path, after, from, before);
}

export function renderPlan(view: PlanView): string {
  const { path, against, changes, settings, services, drainsEnded, flows, network } = view;
  const what = against.version === null ? against.path : `what is in use (${against.path}, version ${against.version})`;
  const blocks = [`${path} compared with ${what}\n`];
  if (!changes) blocks.push('nothing changes\n');
  if (settings.length > 0) {
    const rows = settings.map((change) => `~ ${sayField(change)}${change.restart ? ' (takes a restart)' : ''}\n`);
    blocks.push(rows.join(''));
  }
  blocks.push(...services.map(renderService));
  if (drainsEnded.length > 0) blocks.push(`drains by command that end: ${drainsEnded.join(', ')}\n`);
  if (flows !== null && changes) blocks.push(`connections: ${sayFates(flows)}\n`);
  if (network !== null) {
    if (network.commands.length > 0) blocks.push(renderCommands('the kernel', network.commands));
    if (network.later.length > 0) {
      blocks.push(renderCommands('the kernel, when no connection needs it any more', network.later));
    }
    if (network.notes.length > 0) blocks.push(network.notes.map((note) => `note: ${note}\n`).join(''));
  }
  return blocks.join('\n');
}

const SIGNS: Readonly<Record<Change, string>> = { added: '+', changed: '~', removed: '-', same: '=' };

function renderService(service: ServicePlan): string {
  const { name, address, port, protocol, change, fields, backends, slots, flows, affinityLost } = service;
  const lines = [`${SIGNS[change]} ${name} ${address}:${port}/${protocol}`];
  for (const field of fields) lines.push(`    ${sayField(field)}`);
  // Those of a service that comes or goes whole come and go with it.
  for (const backend of change === 'changed' || change === 'same' ? backends : [])
    lines.push(`  ${sayBackend(backend)}`);
  if (change === 'added') lines.push(`    with ${plural(backends.length, 'backend')}`);
  if (slots !== null && slots.changed > 0) {
    lines.push(`    slots: ${slots.changed} of ${slots.size} change owner (${percent(slots.share)})`);
  }
  if (flows !== null && flows.live > 0) lines.push(`    connections: ${sayFates(flows)}`);
  if (affinityLost !== null && affinityLost > 0) {
    lines.push(`    affinity: ${plural(affinityLost, 'client')} will be led to another backend`);
  }
  return `${lines.join('\n')}\n`;
}

function sayBackend({ name, address, port, change, fields }: BackendPlan): string {
  const what = fields.map(sayField).join(', ');
  return `${SIGNS[change]} ${nameAndAddress(name, `${address}:${port}`)}${what === '' ? '' : `: ${what}`}`;
}

/** A list's few changes by name, many by number. */
const SHOWN = 6;

function sayField({ key, before, after, added, removed }: FieldChange): string {
  if (added === undefined || removed === undefined) return `${key} ${before} -> ${after}`;
  const changes = [...added.map((each) => `+${each}`), ...removed.map((each) => `-${each}`)];
  if (changes.length <= SHOWN) return `${key} ${changes.join(' ')}`;
  return `${key} +${added.length} -${removed.length}: ${changes.slice(0, SHOWN).join(' ')} ...`;
}

function sayFates({ live, kept, moved, cutLater, cut }: FlowFates): string {
  const parts = [`${kept} kept`];
  if (moved > 0) parts.push(`${moved} moved (they pick a backend again)`);
  if (cutLater > 0) parts.push(`${cutLater} kept until the drain time is over`);
  if (cut > 0) parts.push(`${cut} cut at once`);
  return `${live} live: ${parts.join(', ')}`;
}

function renderCommands(title: string, commands: readonly string[]): string {
  return `${title}:\n${commands.map((command) => `  ${command}\n`).join('')}`;
}

function percent(share: number): string {
  return `${Number((share * 100).toFixed(2))} %`;
}
