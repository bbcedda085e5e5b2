import type { ClientView, LiveView, ReasonView } from '../lib/control/live/live-view.js';
import type { TableView } from '../lib/control/view.js';
import { byId, KeyedList, make, type Shown, setText } from './dom.js';
import { bytes, duration, percent, si, whole } from './format.js';

/** The parts of the page that only show: conntrack, clients, reasons, and lists of facts. */

/** Names and values; a value that is absent is left out. */
export class Facts {
  readonly #list: KeyedList<readonly [string, string]>;

  constructor(list: HTMLElement) {
    this.#list = new KeyedList<readonly [string, string]>(
      list,
      ([name]) => name,
      ([name]) => {
        const value = make('dd');
        return { element: make('div', {}, make('dt', {}, name), value), update: ([, text]) => setText(value, text) };
      },
    );
  }

  show(facts: readonly (readonly [string, string])[]): void {
    this.#list.show(facts);
  }
}

const TABLE_TITLES = { tcp: 'TCP', any: 'UDP and others' } as const;

export class ConntrackPanel {
  readonly #tables = new KeyedList<readonly ['tcp' | 'any', TableView]>(
    byId('tables'),
    ([name]) => name,
    ([name]) => tableFill(TABLE_TITLES[name]),
  );
  readonly #collection = new Facts(byId('collection'));

  show({ conntrack: { tables, gc }, count }: LiveView): void {
    this.#tables.show([
      ['tcp', tables.tcp],
      ['any', tables.any],
    ]);
    setText(byId('counted'), `Counted ${count.secondsAgo < 1 ? 'now' : `${Math.round(count.secondsAgo)} s ago`}`);
    this.#collection.show([
      ['Interval', duration(gc.intervalSeconds)],
      ['Passes', whole(gc.runs)],
      ['Last pass', gc.runs === 0 ? 'none yet' : `${ms(gc.lastPassSeconds)}, ${whole(gc.lastDeleted)} deleted`],
      ['Longest slice', ms(gc.longestSliceSeconds)],
    ]);
  }
}

function tableFill(title: string): Shown<readonly [string, TableView]> {
  const count = make('p', { class: 'muted' });
  const fill = make('span');
  const bar = make('span', { class: 'bar wide', 'aria-hidden': 'true' }, fill);
  const states = make('ul', { class: 'states' });
  const list = new KeyedList<{ readonly name: string; readonly count: number; readonly share: number }>(
    states,
    ({ name }) => name,
    ({ name }) => {
      const number = make('span', { class: 'number' });
      const part = make('span');
      const row = make(
        'li',
        {},
        make('span', {}, name),
        make('span', { class: 'bar', 'aria-hidden': 'true' }, part),
        number,
      );
      return {
        element: row,
        update: ({ count, share }) => {
          part.style.inlineSize = `${share * 100}%`;
          setText(number, whole(count));
        },
      };
    },
  );
  const evicted = make('p', { class: 'muted' });
  const empty = make('p', { class: 'empty' }, 'No connections.');
  const element = make('div', { class: 'fill' }, make('h3', {}, title), count, bar, states, empty, evicted);
  return {
    element,
    update([, table]) {
      const { entries, limit, evicted: lost, insertFailures } = table;
      setText(count, `${whole(entries)} of ${whole(limit)}, ${percent(entries / limit)}`);
      fill.style.inlineSize = `${(entries / limit) * 100}%`;
      bar.classList.toggle('high', entries / limit > 0.9);
      list.show(Object.entries(table.states).map(([name, count]) => ({ name, count, share: count / entries })));
      empty.hidden = entries > 0;
      const evictions = lost.expired + lost.closing + lost.halfOpen;
      setText(
        evicted,
        evictions + insertFailures === 0 ? '' : `${whole(evictions)} evicted, ${whole(insertFailures)} refused`,
      );
    },
  };
}

export class ClientPanel {
  readonly #list: KeyedList<ClientView>;

  /** @param onPick somebody wants to see a client's connections */
  constructor(onPick: (address: string) => void) {
    const body = byId('clients-table').querySelector('tbody')!;
    this.#list = new KeyedList<ClientView>(
      body,
      ({ address }) => address,
      ({ address }) => {
        const name = make(
          'button',
          { type: 'button', class: 'name', title: `List the connections of ${address}` },
          address,
        );
        name.addEventListener('click', () => onPick(address));
        const connections = make('td', { class: 'number' });
        const carried = make('td', { class: 'number' });
        return {
          element: make('tr', {}, make('th', { scope: 'row' }, name), connections, carried),
          update: (client) => {
            setText(connections, whole(client.connections));
            setText(carried, bytes(client.bytes));
          },
        };
      },
    );
  }

  show({ clients: { distinct, error, top } }: LiveView): void {
    this.#list.show(top.slice(0, 10));
    byId('clients-table').hidden = top.length === 0;
    byId('clients-empty').hidden = top.length > 0;
    const all = distinct === null ? 'more than can be told apart' : whole(distinct);
    const short = error === 0 ? '' : `; figures may be ${whole(error)} too low`;
    setText(byId('clients-note'), top.length === 0 ? '' : `of ${all}${short}`);
  }
}

const VERDICTS = { drop: 'dropped', reply: 'answered', pass: 'passed on' } as const;

export class ReasonPanel {
  readonly #list = new KeyedList<ReasonView>(
    byId('reasons-table').querySelector('tbody')!,
    ({ reason }) => reason,
    ({ reason, verdict, meaning }) => {
      const rate = make('td', { class: 'number', 'data-label': 'Per second' });
      const packets = make('td', { class: 'number', 'data-label': 'Packets' });
      const badge = make('span', { class: `verdict ${verdict}` }, VERDICTS[verdict]);
      return {
        element: make(
          'tr',
          {},
          make('th', { scope: 'row' }, make('code', {}, reason), badge),
          make('td', {}, meaning),
          rate,
          packets,
        ),
        update: (now) => {
          setText(rate, si(now.rate));
          setText(packets, whole(now.packets));
        },
      };
    },
  );

  show({ reasons }: LiveView): void {
    this.#list.show(reasons);
    byId('reasons-table').hidden = reasons.length === 0;
    byId('reasons-empty').hidden = reasons.length > 0;
  }
}

function ms(seconds: number): string {
  return seconds < 0.01 ? `${(seconds * 1000).toFixed(1)} ms` : `${Math.round(seconds * 1000)} ms`;
}
