import { WeirError } from '../base/errors.js';
import { stepBack } from '../control/priority.js';
import { plural, sayCounts } from '../control/summary.js';
import type { ConntrackView, DrainView, FlushView, ReloadView, ServiceView, StatusView } from '../control/view.js';
import { callJson, callStream } from './client.js';
import { print, printJson } from './output.js';
import { renderConntrack, renderDrain, renderServices, renderStatus } from './render.js';

/** The commands that talk to a running weir. */

export interface SocketOptions {
  readonly socket: string;
}

export interface FilterOptions extends SocketOptions {
  readonly service?: string;
  readonly backend?: string;
  readonly client?: string;
  readonly state?: string;
}

type Format = 'table' | 'json';

export async function status({ socket, output }: SocketOptions & { output: Format }): Promise<void> {
  const view = await callJson<StatusView>({ socket, path: '/v1/status' });
  if (output === 'json') return printJson(view);
  const services = await callJson<ServiceView[]>({ socket, path: '/v1/services' });
  await print(`${renderStatus(view)}\n${renderServices(services)}`);
}

export async function services({ socket, output }: SocketOptions & { output: Format }): Promise<void> {
  const views = await callJson<ServiceView[]>({ socket, path: '/v1/services' });
  await (output === 'json' ? printJson(views) : print(renderServices(views)));
}

export async function metrics({ socket }: SocketOptions): Promise<void> {
  await callStream({ socket, path: '/metrics' }, print);
}

export async function reload({ socket, output }: SocketOptions & { output: Format }): Promise<void> {
  const view = await callJson<ReloadView>({ socket, method: 'POST', path: '/v1/reload' });
  await (output === 'json' ? printJson(view) : print(`applied ${view.path}: ${sayCounts(view)}\n`));
}

export async function drain(
  verb: 'drain' | 'undrain',
  service: string,
  backend: string,
  { socket, output }: SocketOptions & { output: Format },
): Promise<void> {
  const query = { service, backend };
  const view = await callJson<DrainView>({ socket, method: 'POST', path: `/v1/${verb}`, query });
  await (output === 'json' ? printJson(view) : print(renderDrain(view)));
}

export async function ctList({ output, ...options }: FilterOptions & { output: string }): Promise<void> {
  const query = { ...filterOf(options), format: output };
  stepBack();
  await callStream({ socket: options.socket, path: '/v1/ct', query }, print);
}

export async function ctStats({ socket, output }: SocketOptions & { output: Format }): Promise<void> {
  const view = await callJson<ConntrackView>({ socket, path: '/v1/ct/stats' });
  await (output === 'json' ? printJson(view) : print(renderConntrack(view)));
}

export async function ctFlush({
  all,
  output,
  ...options
}: FilterOptions & { all?: boolean; output: Format }): Promise<void> {
  const query = filterOf(options);
  const isFiltered = Object.values(query).some((value) => value !== undefined);
  if (!isFiltered && !all) {
    throw new WeirError('USAGE', 'nothing says which connections to forget', 'Give a filter, or --all.');
  }
  const view = await callJson<FlushView>({ socket: options.socket, method: 'POST', path: '/v1/ct/flush', query });
  await (output === 'json' ? printJson(view) : print(`${plural(view.flushed, 'connection')} forgotten\n`));
}

/** The part of a command's options that is a query of the admin API. */
export function filterOf({
  service,
  backend,
  client,
  state,
}: Omit<FilterOptions, 'socket'>): Record<string, string | undefined> {
  return { service, backend, client, state };
}
