import { formatIpv4 } from '../../wire/address.js';
import type { ClientsView } from './live-view.js';

/** Addresses that are kept apart. */
const KEPT_CLIENTS = 4096;

/** Of them in a view. */
const SHOWN_CLIENTS = 20;

/**
 * The clients with the most connections, in bounded memory however many there are (Misra and Gries, "Finding repeated elements", 1982).
 *
 * A client that finds no room takes one connection from every client that has some, and from itself: whoever has none left makes room.
 * So n connections are taken from KEPT_CLIENTS + 1 clients at a time, no client loses more than n / (KEPT_CLIENTS + 1) of its
 * connections, and one that has more of them is never missed. While all have room, figures are exact.
 */
export class TopClients {
  readonly #clients = new Map<number, { connections: number; bytes: number }>();
  /** Connections taken from every client. */
  #taken = 0;

  /** @param address an IPv4 word, signed or unsigned, always the same way */
  add(address: number, bytes: number): void {
    const client = this.#clients.get(address);
    if (client !== undefined) {
      client.connections++;
      client.bytes += bytes;
      return;
    }
    if (this.#clients.size < KEPT_CLIENTS) {
      this.#clients.set(address, { connections: 1, bytes });
      return;
    }
    this.#taken++;
    for (const [each, client] of this.#clients) if (--client.connections === 0) this.#clients.delete(each);
  }

  view(): ClientsView {
    const clients = [...this.#clients].sort(([, a], [, b]) => b.connections - a.connections || b.bytes - a.bytes);
    return {
      distinct: this.#taken === 0 ? clients.length : null,
      error: this.#taken,
      top: clients.slice(0, SHOWN_CLIENTS).map(([address, client]) => ({ address: formatIpv4(address), ...client })),
    };
  }
}
