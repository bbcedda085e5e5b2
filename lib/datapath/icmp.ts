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
import { swapPorts } from './packet.js';
import { VIP_ECHO } from './snapshot.js';

/**
 * Rules 1 and 6: ICMP. Echo requests to a VIP are answered here and go no further. Errors belong to the flow they quote and are
 * translated like its packets; they create, refresh and close nothing.
 */
export class IcmpStage {
  readonly #core: Core;
  readonly #dsr: DsrStage;
  readonly #quote = makeQuote();

  constructor(core: Core, dsr: DsrStage) {
    this.#core = core;
    this.#dsr = dsr;
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
      this.#unknown(isOurs);
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

  #unknown(isOurs: boolean): void {
    if (isOurs) this.#core.drop(REASON['icmp-unknown-flow']);
    else this.#core.pass();
  }
}
