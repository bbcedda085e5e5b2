import { lookup } from '../balance/lookup.js';
import { REASON } from '../base/reasons.js';
import {
  BACKEND,
  BACKEND_ID,
  CLIENT,
  ORIGINAL_PORTS,
  RECORD_BYTES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  TYPE,
  TYPE_SVC,
  VIP,
} from '../conntrack/record.js';
import { answerEcho } from '../nat/answer.js';
import { makeQuote, parseQuote, translateError } from '../nat/icmp-error.js';
import * as icmp from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import type { Core } from './core.js';
import type { DsrStage } from './dsr.js';
import { isInSourceRanges } from './limits.js';
import { swapPorts } from './packet.js';
import { choiceOfHash } from './pick-up.js';
import {
  BACKEND_ADDRESS,
  BACKEND_PORT,
  BACKEND_WORDS,
  CHOICES_AT,
  CHOICES_COUNT,
  MODE_DSR,
  SERVICE_MODE,
  SERVICE_WORDS,
  VIP_ECHO,
} from './snapshot.js';

/**
 * Rules 1 and 6: ICMP. Echo requests to a VIP are answered here and go no further. Errors belong to the flow they quote and are
 * translated like its packets; they create, refresh and close nothing.
 */
export class IcmpStage {
  readonly #core: Core;
  readonly #dsr: DsrStage;
  readonly #leadsByHash: boolean;
  readonly #quote = makeQuote();

  /** @param leadsByHash whether flows without a record may have a backend, as on a gateway those of dsr do */
  constructor(core: Core, dsr: DsrStage, leadsByHash: boolean) {
    this.#core = core;
    this.#dsr = dsr;
    this.#leadsByHash = leadsByHash;
  }

  process(): void {
    const core = this.#core;
    const { packet, bytes } = core;
    const vipBits = core.vipBits(packet.destination);
    const isOurs = vipBits !== 0 || core.isSnatAddress(packet.destination);
    if (ipv4.isFragment(bytes, packet.at)) {
      // An error is never fragmented, and a request is not reassembled here.
      if (isOurs) core.drop(REASON[vipBits !== 0 ? 'icmp-unknown-flow' : 'untracked-reply']);
      else core.pass();
      return;
    }
    const type = icmp.type(bytes, packet.l4);
    if (icmp.isError(type)) this.#error(isOurs);
    else if (!isOurs) core.pass();
    else if (vipBits === 0) core.drop(REASON['untracked-reply']);
    else if (type !== icmp.ECHO_REQUEST) core.drop(REASON['icmp-unknown-flow']);
    else if ((vipBits & VIP_ECHO) === 0) core.drop(REASON['echo-off']);
    else core.answer(answerEcho, REASON.echo, REASON['icmp-unknown-flow']);
  }

  /**
   * The quote is a packet of the flow as it was on its way out of weir, so its tuple reversed is the one its answer would
   * have: the original key for an error from the client's side, the reply key for one from the backend's.
   */
  #error(isOurs: boolean): void {
    const core = this.#core;
    const { packet, bytes, view, nowMs } = core;
    const quote = this.#quote;
    const refusal = parseQuote(view, bytes, packet.at, packet.l4, packet.at + packet.length, quote);
    if (refusal === REASON['icmp-malformed']) {
      core.drop(refusal);
      return;
    }
    if (refusal !== 0) {
      this.#unknown(isOurs);
      return;
    }
    this.#dsr.heed(view, bytes, packet.at, packet.l4, quote);
    const table = core.tableOf(quote.protocol);
    const ports = swapPorts(quote.ports);
    const hash = table.hash(quote.destination, quote.source, ports, quote.protocol);
    const reference = table.find(quote.destination, quote.source, ports, quote.protocol, hash);
    const record = reference >> 1;
    if (reference < 0 || table.isExpired(record, nowMs)) {
      if (!this.#leadsByHash || !this.#followHash()) this.#unknown(isOurs);
      return;
    }
    const word = record * RECORD_WORDS;
    const { words } = table;
    const fromBackendSide = (reference & 1) !== 0;
    core.noteFlow(table, record, fromBackendSide);
    const isOneWay = table.bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC;
    const node = isOneWay ? this.#dsr.nodeOf(words[word + BACKEND_ID]!) : 0;
    if (isOneWay && !this.#dsr.accepts(node)) return;
    if (fromBackendSide) {
      const client = words[word + CLIENT]!;
      const vip = words[word + VIP]!;
      const source = packet.source === words[word + BACKEND] ? vip : packet.source;
      translateError(
        view,
        bytes,
        packet.at,
        packet.l4,
        quote,
        source,
        client,
        client,
        vip,
        words[word + ORIGINAL_PORTS]!,
      );
    } else {
      const backend = words[word + BACKEND]!;
      const source = packet.source === words[word + CLIENT] ? words[word + RETURN]! : packet.source;
      translateError(
        view,
        bytes,
        packet.at,
        packet.l4,
        quote,
        source,
        backend,
        backend,
        words[word + RETURN]!,
        words[word + REPLY_PORTS]!,
      );
    }
    if (!isOneWay) core.forward();
    else {
      const client = words[word + CLIENT]!;
      this.#dsr.forward(node, client, words[word + VIP]!, words[word + ORIGINAL_PORTS]!, quote.protocol, false);
    }
  }

  /**
   * An error about an answer of a dsr service, of a flow that has no record here: routers that spread flows over gateways send errors
   * about them elsewhere, since those have no ports. It goes where the flow's packets go, by the hash.
   *
   * @returns whether there is such a service and backend; the packet has come to its end then
   */
  #followHash(): boolean {
    const core = this.#core;
    const { packet, bytes, view, snapshot } = core;
    const { services, backends, choices } = snapshot;
    const quote = this.#quote;
    const { source: vip, destination: client, protocol } = quote;
    const vipPort = quote.ports >>> 16;
    const service = lookup(snapshot.serviceIndex, vip, vipPort, protocol);
    const row = service * SERVICE_WORDS;
    if (service === 0 || services[row + SERVICE_MODE] !== MODE_DSR || services[row + CHOICES_COUNT] === 0) return false;
    if (!isInSourceRanges(snapshot, row, client)) return false;
    const choice = choiceOfHash(snapshot, row, client, quote.ports & 0xffff, vipPort, protocol);
    const id = choices[(services[row + CHOICES_AT]! + choice) * 2]!;
    const backend = backends[id * BACKEND_WORDS + BACKEND_ADDRESS]!;
    if (backend === client || core.isOwn(client)) return false;
    core.noteChoice(service, id);
    const node = this.#dsr.nodeOf(id);
    if (!this.#dsr.accepts(node)) return true;
    const ports = (backends[id * BACKEND_WORDS + BACKEND_PORT]! << 16) | (quote.ports & 0xffff);
    translateError(view, bytes, packet.at, packet.l4, quote, packet.source, backend, backend, client, ports);
    this.#dsr.forward(node, client, vip, swapPorts(quote.ports), protocol, false);
    return true;
  }

  #unknown(isOurs: boolean): void {
    if (isOurs) this.#core.drop(REASON['icmp-unknown-flow']);
    else this.#core.pass();
  }
}
