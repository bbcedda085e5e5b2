import type { FlowJson } from '../lib/control/flows.js';
import { byId, make, setText } from './dom.js';
import { bytes, duration, whole } from './format.js';
import { ask } from './stream.js';

/** Rows at once: who needs more narrows the filter, or asks `weir ct list`. */
const MOST_ROWS = 100;

/** Lists connections that meet a filter, when it is asked for: a table that moved by itself could not be read. */
export class ConnectionsPanel {
  readonly #form = byId<HTMLFormElement>('filter');
  readonly #note = byId('connections-note');
  readonly #table = byId('connections-table');
  readonly #onExplain: (flow: FlowJson) => void;
  /** Of the last question; the answers to earlier ones come too late. */
  #asked = 0;

  constructor(onExplain: (flow: FlowJson) => void) {
    this.#onExplain = onExplain;
    this.#form.addEventListener('submit', (event) => {
      event.preventDefault();
      void this.list();
    });
    // The fields are empty only after this event.
    this.#form.addEventListener('reset', () => setTimeout(() => void this.list()));
  }

  /** The names that can be chosen. */
  setServices(names: readonly string[]): void {
    const select = this.#field<HTMLSelectElement>('service');
    const shown = [...select.options].slice(1).map(({ value }) => value);
    if (shown.join('\n') === names.join('\n')) return;
    const chosen = select.value;
    select.replaceChildren(
      make('option', { value: '' }, 'any'),
      ...names.map((name) => make('option', { value: name }, name)),
    );
    select.value = names.includes(chosen) ? chosen : '';
  }

  showClient(address: string): void {
    for (const name of ['service', 'backend', 'state']) this.#field<HTMLInputElement>(name).value = '';
    this.#field<HTMLInputElement>('client').value = address;
    this.#form.scrollIntoView({ block: 'center' });
    this.#field<HTMLInputElement>('client').focus({ preventScroll: true });
  }

  async list(): Promise<void> {
    const question = ++this.#asked;
    const filter = Object.fromEntries(
      [...new FormData(this.#form)].map(([name, value]) => [name, String(value).trim()]),
    );
    try {
      const flows = await ask<FlowJson[]>('/v1/ct', { ...filter, limit: String(MOST_ROWS + 1) });
      if (question === this.#asked) this.#show(flows, Object.values(filter).some(Boolean));
    } catch (error) {
      if (question === this.#asked) this.#say((error as Error).message, true);
    }
  }

  #show(flows: readonly FlowJson[], isFiltered: boolean): void {
    const rows = flows.slice(0, MOST_ROWS).map((flow) => this.#row(flow));
    this.#table.querySelector('tbody')!.replaceChildren(...rows);
    this.#table.hidden = rows.length === 0;
    if (rows.length === 0) this.#say(isFiltered ? 'No connection meets the filter.' : 'There are no connections yet.');
    else if (flows.length > MOST_ROWS)
      this.#say(`The first ${MOST_ROWS}; there are more: narrow the filter, or use weir ct list.`);
    else this.#say(`${rows.length} ${rows.length === 1 ? 'connection' : 'connections'}.`);
  }

  #row(flow: FlowJson): HTMLElement {
    const { proto, client, vip, backend, service, state, packets, bytes: carried, expiresIn, flags } = flow;
    const explain = make('button', { type: 'button', 'aria-label': `Explain the next packet of ${client}` }, 'Explain');
    explain.addEventListener('click', () => this.#onExplain(flow));
    const number = (text: string, label: string): HTMLElement =>
      make('td', { class: 'number', 'data-label': label }, text);
    return make(
      'tr',
      {},
      make('th', { scope: 'row' }, `${proto} ${client}`),
      make('td', { 'data-label': 'VIP' }, vip),
      make('td', { 'data-label': 'Service' }, service),
      make('td', { 'data-label': 'Backend' }, backend),
      make('td', { 'data-label': 'State', title: flags.join(' ') }, state),
      number(`${whole(packets.original)} / ${whole(packets.reply)}`, 'Packets'),
      number(`${bytes(carried.original)} / ${bytes(carried.reply)}`, 'Bytes'),
      number(duration(expiresIn), 'Expires in'),
      make('td', {}, explain),
    );
  }

  #say(text: string, isError = false): void {
    setText(this.#note, text);
    this.#note.classList.toggle('error', isError);
  }

  #field<Type extends HTMLElement>(name: string): Type {
    return this.#form.elements.namedItem(name) as unknown as Type;
  }
}
