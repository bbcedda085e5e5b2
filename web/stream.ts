import type { LiveView } from '../lib/control/live/live-view.js';

/** After a refusal, of which a browser does not recover by itself. */
const AGAIN_MS = 3000;

/** Without a view for so long, the connection counts as lost: whatever stands between may hide that. */
const SILENCE_MS = 12_000;

/** For how long a page that nobody sees goes on. */
const HIDDEN_MS = 60_000;

export type LinkState = 'connecting' | 'live' | 'lost' | 'paused';

export interface StreamEvents {
  view(view: LiveView): void;
  state(state: LinkState): void;
}

/** Follows `/v1/live` for as long as the page is seen, and takes it up again whenever it breaks. */
export class Stream {
  readonly #events: StreamEvents;
  #source: EventSource | undefined;
  #silence: number | undefined;
  #again: number | undefined;
  #hidden: number | undefined;

  constructor(events: StreamEvents) {
    this.#events = events;
    document.addEventListener('visibilitychange', () => this.#followVisibility());
    this.#open();
  }

  #open(): void {
    this.#close();
    const source = new EventSource('/v1/live');
    this.#source = source;
    this.#expect();
    source.addEventListener('message', ({ data }: MessageEvent<string>) => {
      this.#expect();
      this.#events.state('live');
      this.#events.view(JSON.parse(data) as LiveView);
    });
    source.addEventListener('error', () => {
      this.#events.state('lost');
      if (source.readyState === EventSource.CLOSED) this.#openLater();
    });
  }

  #expect(): void {
    window.clearTimeout(this.#silence);
    this.#silence = window.setTimeout(() => {
      this.#events.state('lost');
      this.#open();
    }, SILENCE_MS);
  }

  #openLater(): void {
    this.#close();
    this.#again = window.setTimeout(() => this.#open(), AGAIN_MS);
  }

  #close(): void {
    this.#source?.close();
    this.#source = undefined;
    window.clearTimeout(this.#silence);
    window.clearTimeout(this.#again);
  }

  #followVisibility(): void {
    window.clearTimeout(this.#hidden);
    if (!document.hidden) {
      if (this.#source === undefined) this.#open();
      return;
    }
    this.#hidden = window.setTimeout(() => {
      this.#close();
      this.#events.state('paused');
    }, HIDDEN_MS);
  }
}

/** The JSON of an answer. @throws Error with what weir says of it, and what to do */
export async function ask<Answer>(path: string, query: Readonly<Record<string, string>>): Promise<Answer> {
  const given = Object.entries(query).filter(([, value]) => value !== '');
  let response: Response;
  try {
    response = await fetch(`${path}?${new URLSearchParams(given)}`);
  } catch {
    throw new Error('weir does not answer. Is it running?');
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(`${capital(answer.message)}. ${answer.remedy}`);
  return answer as Answer;
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
