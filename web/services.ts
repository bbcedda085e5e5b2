import type { LiveBackendView, LiveServiceView } from '../lib/control/live/live-view.js';
import type { Look, Looks } from './colours.js';
import { KeyedList, make, type Shown, setText } from './dom.js';
import { bits, duration, percent, si, whole } from './format.js';
import { backendKey, serviceKey, total } from './history.js';

type Row = Shown<LiveServiceView | LiveBackendView>;

/** The table of services: a body for each, whose first row is the service itself. */
export class ServiceTable {
  readonly #list: KeyedList<LiveServiceView>;

  /** @param onPick somebody wants to see a service's backends in the charts */
  constructor(table: HTMLTableElement, looks: Looks, onPick: (key: string) => void) {
    this.#list = new KeyedList(table, serviceKey, (service) => new ServiceBody(serviceKey(service), looks, onPick));
  }

  show(services: readonly LiveServiceView[]): void {
    this.#list.show(services);
  }
}

class ServiceBody implements Shown<LiveServiceView> {
  readonly element = make('tbody');
  readonly #name = make('button', { type: 'button', class: 'name' });
  readonly #how = make('span', { class: 'muted' });
  readonly #row: Row;
  readonly #none = make('tr', {}, make('td', { colspan: 8, class: 'muted indent' }, 'No backends.'));
  readonly #backends: KeyedList<LiveBackendView>;

  constructor(key: string, looks: Looks, onPick: (key: string) => void) {
    const name = make('th', { scope: 'rowgroup' }, swatch(looks.of(key)), this.#name, this.#how);
    this.#name.addEventListener('click', () => onPick(key));
    this.#row = figures(name, 'service');
    this.element.append(this.#row.element);
    this.#backends = new KeyedList(
      this.element,
      (backend) => backendKey(key, backend),
      (backend) => {
        const label = make('span');
        const address = make('span', { class: 'muted' });
        const head = make('th', { scope: 'row' }, swatch(looks.of(backendKey(key, backend))), label, address);
        const row = figures(head, 'backend');
        return {
          element: row.element,
          update: (now) => {
            setText(label, now.name);
            const endpoint = `${now.address}:${now.port}`;
            setText(address, endpoint === now.name ? '' : endpoint);
            row.update(now);
          },
        };
      },
    );
  }

  update(service: LiveServiceView): void {
    const { name, address, port, protocol, algorithm, mode, removed } = service;
    setText(this.#name, name);
    this.#name.title = `Show the backends of ${name} in the charts`;
    setText(this.#how, `${address}:${port}/${protocol} · ${algorithm} ${mode}${removed ? ' · removed' : ''}`);
    this.#row.update(service);
    this.#backends.show(service.backends);
    if (service.backends.length === 0) this.element.append(this.#none);
    else this.#none.remove();
  }
}

/** A row of figures behind its head. */
function figures(head: HTMLElement, kind: 'service' | 'backend'): Row {
  const state = make('td', { 'data-label': 'State' });
  const share = make('td', { 'data-label': 'Share' });
  const numbers = ['Weight', 'Packets/s', 'Bits/s', 'New/s', 'Open'].map((label) =>
    make('td', { class: 'number', 'data-label': label }),
  );
  const stateOf = stateCell(state);
  const shareOf = kind === 'backend' ? shareCell(share) : () => {};
  const element = make('tr', { class: kind }, head, state, share, ...numbers);
  return {
    element,
    update(item) {
      const isBackend = 'share' in item;
      if (isBackend) stateOf(item);
      else setText(state, summary(item.backends));
      if (isBackend) shareOf(item.share);
      const { rates, open, maxConnections } = item;
      const limit = maxConnections === null ? '' : ` / ${whole(maxConnections)}`;
      const texts = [
        isBackend ? String(item.weight) : '',
        si(total(rates, 'packets')),
        bits(total(rates, 'bits')),
        si(rates.connections),
        `${whole(open)}${limit}`,
      ];
      for (const [i, cell] of numbers.entries()) setText(cell, texts[i]!);
    },
  };
}

function summary(backends: readonly LiveBackendView[]): string {
  if (backends.length === 0) return '';
  const takers = backends.filter(({ takesNew }) => takesNew).length;
  return `${takers} of ${backends.length} take new`;
}

const SIGNS = { active: '●', down: '▲', draining: '◐' } as const;

function stateCell(cell: HTMLElement): (backend: LiveBackendView) => void {
  const sign = make('span', { 'aria-hidden': 'true' });
  const name = make('span');
  const badge = make('span', { class: 'state' }, sign, name);
  const why = make('span', { class: 'muted' });
  cell.append(badge, why);
  return (backend) => {
    badge.dataset.state = backend.state;
    setText(sign, SIGNS[backend.state]);
    setText(name, backend.state);
    setText(why, reasonOf(backend));
  };
}

/** What it drains by, or what its checks find. */
function reasonOf({ state, drainedBy, takesNew, health }: LiveBackendView): string {
  if (drainedBy !== null) return `by ${drainedBy}`;
  if (state === 'down')
    return takesNew ? 'used, as all are down' : `${health?.last ?? ''}, ${duration(health?.seconds ?? 0)}`;
  return health === null ? 'not checked' : `up ${duration(health.seconds)}`;
}

function shareCell(cell: HTMLElement): (share: number) => void {
  const fill = make('span');
  const text = make('span', { class: 'number' });
  cell.append(make('span', { class: 'bar', 'aria-hidden': 'true' }, fill), text);
  cell.classList.add('share');
  return (share) => {
    fill.style.inlineSize = `${share * 100}%`;
    setText(text, percent(share));
  };
}

/** The mark that says which line of a chart this is. */
function swatch({ colour, dash }: Look): HTMLElement {
  const style = dash.length === 0 ? 'solid' : dash[0]! > 4 ? 'dashed' : 'dotted';
  return make('i', { class: `swatch line-${colour} ${style}`, 'aria-hidden': 'true' });
}
