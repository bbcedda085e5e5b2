import { openAny, trackAny } from '../conntrack/any-tracker.js';
import { EVENT_CREATED, EVENT_STATE } from '../conntrack/events.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import { RECORD_BYTES, STATE, STATE_FREE } from '../conntrack/record.js';
import { openTcp, trackTcp } from '../conntrack/tcp-tracker.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import type { Core } from './core.js';

/** Instead of a STATE, while nobody watches. */
const UNWATCHED = -1;

/**
 * What the packet in hand, TCP or UDP with its header whole, does to the record of its flow: state and timer, counters of the
 * record and of its backend, and the account of the packet itself.
 *
 * @param isNew its flow begins with it
 */
export function trackPacket(core: Core, table: FlowTable, record: number, isReply: boolean, isNew: boolean): void {
  const { packet, bytes, view, snapshot, nowMs } = core;
  const { l4 } = packet;
  if (isNew) core.results.isNew[packet.row] = 1;
  const before = table.isWatched ? table.bytes[record * RECORD_BYTES + STATE]! : UNWATCHED;
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
  core.account(table, record, isReply);
  core.noteFlow(table, record, isReply);
  if (before !== UNWATCHED) tell(table, record, before, nowMs);
}

/** Tells watchers what a packet did to the state of its record, if anything. */
function tell(table: FlowTable, record: number, before: number, nowMs: number): void {
  if (before === STATE_FREE) table.tell(EVENT_CREATED, 0, record, nowMs);
  else if (table.bytes[record * RECORD_BYTES + STATE] !== before) table.tell(EVENT_STATE, before, record, nowMs);
}
