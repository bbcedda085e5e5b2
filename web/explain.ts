import type { ExplainView, OutcomeView, StepView } from '../lib/control/explain/explain-view.js';
import type { FlowJson } from '../lib/control/flows.js';
import { byId, make } from './dom.js';
import { percent } from './format.js';
import { ask } from './stream.js';

/** Asks what would become of a packet, and shows the trace. */
export class ExplainPanel {
  readonly #form = byId<HTMLFormElement>('question');
  readonly #answer = byId('answer');
  #asked = 0;

  constructor() {
    const proto = this.#field('proto');
    const flags = this.#field('flags');
    proto.addEventListener('change', () => {
      flags.disabled = proto.value !== 'tcp';
    });
    this.#form.addEventListener('submit', (event) => {
      event.preventDefault();
      void this.#explain();
    });
  }

  /** Explains the next packet of a connection from its client. */
  explainFlow({ proto, client, vip }: FlowJson): void {
    this.#field('proto').value = proto;
    this.#field('src').value = client;
    this.#field('dst').value = vip;
    this.#field('flags').value = proto === 'tcp' ? 'ack' : '';
    this.#field('flags').disabled = proto !== 'tcp';
    this.#form.scrollIntoView({ block: 'start' });
    this.#field('src').focus({ preventScroll: true });
    void this.#explain();
  }

  async #explain(): Promise<void> {
    const question = ++this.#asked;
    const asked = Object.fromEntries(
      [...new FormData(this.#form)].map(([name, value]) => [name, String(value).trim()]),
    );
    try {
      const view = await ask<ExplainView>('/v1/explain', asked);
      if (question === this.#asked) this.#answer.replaceChildren(...trace(view));
    } catch (error) {
      const text = (error as Error).message;
      if (question === this.#asked) this.#answer.replaceChildren(make('p', { class: 'error' }, text));
    }
  }

  #field(name: string): HTMLInputElement {
    return this.#form.elements.namedItem(name) as HTMLInputElement;
  }
}

function trace({ packet, steps, outcomes, untried, config }: ExplainView): HTMLElement[] {
  const by = config.version === null ? config.path : `${config.path}, version ${config.version}`;
  const head = make(
    'p',
    { class: 'packet' },
    make('code', {}, packet.text),
    make('span', { class: 'muted' }, ` by ${by}`),
  );
  const more = untried === 0 ? [] : [make('p', { class: 'muted' }, `${untried} further outcomes were not tried.`)];
  return [head, list(steps), ...outcomes.flatMap((outcome) => outcomeParts(outcome, outcomes.length)), ...more];
}

function outcomeParts(outcome: OutcomeView, count: number): HTMLElement[] {
  const { probability, verdict, reason, meaning, service, backend, state, out } = outcome;
  const where = [service, backend].filter((name) => name !== null).join(' → ');
  const chance = count > 1 ? ` ${percent(probability)}` : '';
  return [
    ...(outcome.steps.length === 0 ? [] : [list(outcome.steps)]),
    make(
      'p',
      { class: 'outcome' },
      make('span', { class: `verdict ${verdict}` }, `${verdict}${chance}`),
      make('strong', {}, where || (reason ?? '')),
      make(
        'span',
        { class: 'muted' },
        [where === '' ? null : reason, state].filter((part) => part !== null).join(' · '),
      ),
    ),
    ...(meaning === null ? [] : [make('p', { class: 'muted' }, meaning)]),
    ...out.map(({ text, route }) =>
      make(
        'p',
        { class: 'sent' },
        make('code', {}, text),
        make('span', { class: 'muted' }, route === null ? '' : ` ${route}`),
      ),
    ),
  ];
}

function list(steps: readonly StepView[]): HTMLElement {
  const items = steps.map(({ step, result, text, notes }) =>
    make(
      'li',
      {},
      make('span', { class: 'step' }, step),
      make('span', { class: 'result' }, result),
      make('span', {}, text, ...notes.flatMap((note) => [make('br'), make('span', { class: 'muted' }, note)])),
    ),
  );
  return make('ol', { class: 'trace' }, ...items);
}
