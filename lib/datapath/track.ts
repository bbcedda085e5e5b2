import { openAny, trackAny } from '../conntrack/any-tracker.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import { BACKEND_ID, RECORD_WORDS } from '../conntrack/record.js';
import { account, openTcp, trackTcp } from '../conntrack/tcp-tracker.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import type { Core } from './core.js';
import {
  COUNTER_ROWS,
  COUNTER_RX_BYTES,
  COUNTER_RX_PACKETS,
  COUNTER_TX_BYTES,
  COUNTER_TX_PACKETS,
} from './snapshot.js';

/**
 * What the packet in hand, TCP or UDP with its header whole, does to the record of its flow: state and timer, counters of the
 * record and of its backend, and the account of the packet itself.
 *
 * @param isNew its flow begins with it
 */
export function trackPacket(core: Core, table: FlowTable, record: number, isReply: boolean, isNew: boolean): void {
  const { packet, bytes, view, snapshot, nowMs } = core;
  const { l4 } = packet;
  if (packet.protocol === PROTO_TCP) {
    const flags = tcp.flags(bytes, l4);
    const payload = packet.at + packet.length - l4 - tcp.dataOffset(bytes, l4);
    const scale = (flags & tcp.SYN) !== 0 ? tcp.windowScale(bytes, l4) : -1;
    const seq = tcp.sequence(view, l4);
    const ack = tcp.acknowledgement(view, l4);
    const window = tcp.window(bytes, l4);
    if (isNew) openTcp(table, record, flags, seq, ack, window, payload, scale, nowMs, snapshot.timeouts);
    else trackTcp(table, record, isReply, flags, seq, ack, window, payload, scale, nowMs, snapshot.timeouts);
  } else if (isNew) openAny(table, record, nowMs, snapshot.timeouts);
  else trackAny(table, record, isReply, nowMs, snapshot.timeouts);
  account(table, record, isReply, packet.length, nowMs);

  core.noteFlow(table, record, isReply);
  const counter = table.words[record * RECORD_WORDS + BACKEND_ID]! * COUNTER_ROWS;
  snapshot.counters[counter + (isReply ? COUNTER_RX_PACKETS : COUNTER_TX_PACKETS)]! += 1;
  snapshot.counters[counter + (isReply ? COUNTER_RX_BYTES : COUNTER_TX_BYTES)]! += packet.length;
}
