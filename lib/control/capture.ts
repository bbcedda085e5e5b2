import type { Clock } from '../base/clock.js';
import { WeirError } from '../base/errors.js';
import { MAX_PACKET_BYTES } from '../base/limits.js';
import { REASON_NAMES } from '../base/reasons.js';
import { STATE_NAMES } from '../conntrack/record.js';
import * as RING from '../datapath/capture-ring.js';
import {
  BACKEND_ADDRESS,
  BACKEND_PORT,
  BACKEND_WORDS,
  SERVICE_FLAGS,
  SERVICE_MAGLEV,
  SERVICE_WORDS,
} from '../datapath/snapshot.js';
import type { CaptureRequest } from '../datapath/tap.js';
import * as VERDICT from '../datapath/verdict.js';
import { formatEndpoint } from '../wire/address.js';
import { LINK_RAW } from '../wire/capture.js';
import * as ipv4 from '../wire/ipv4.js';
import {
  INBOUND,
  interfaceBlock,
  OUTBOUND,
  packetBlock,
  sectionBlock,
  statisticsBlock,
} from '../wire/pcapng-writer.js';
import { UDP_HEADER_BYTES } from '../wire/udp.js';
import * as vnet from '../wire/vnet.js';
import type { Desired } from './desired.js';
import { requireNames } from './find-backend.js';
import { parseClient } from './flows.js';
import type { EventLog } from './log.js';
import { nameAndAddress } from './summary.js';
import type { Capture, CaptureOptions } from './view.js';

/** What the data path can be ahead of a reader: 0.1 s of 600 Mb/s. */
const RING_BYTES = 8 * 1024 * 1024;

/** How long a packet may wait to be read. */
const POLL_MS = 20;

/** Handed over at a time: some 2 ms. */
const CHUNK_BYTES = 256 * 1024;

/** The interfaces of a file. */
const IN = 0;
const OUT = 1;

export interface CaptureParts {
  readonly version: string;
  readonly desired: Pick<Desired, 'config' | 'identities' | 'snapshot'>;
  /** The data path's. */
  readonly clock: Clock;
  readonly path: { capture(request: CaptureRequest | null): Promise<void> };
  readonly log: EventLog;
}

/**
 * Captures, one at a time: packets from the data path's ring, as a pcapng file that may be read while it grows. Two interfaces, `in`
 * and `out`; each packet in says in its comment what was decided, and is followed by what it became, which names it.
 *
 *     data path --ring--> entry --> blocks --> taken by the client, when it likes
 *                  |
 *                  +-- full: lost, and counted
 *
 * Nothing is read ahead of the client: the ring is all that waits.
 */
export class Captures {
  readonly #parts: CaptureParts;
  /** One for all captures: both threads would hold a ring each until they next collect what is old. */
  #ring: SharedArrayBuffer | undefined;
  #isTaken = false;

  constructor(parts: CaptureParts) {
    this.#parts = parts;
  }

  /** @throws WeirError USAGE on options that mean nothing, NOT_SUPPORTED while there is another capture */
  begin(options: CaptureOptions): Capture {
    this.#requireFree();
    const filter = compileFilter(options, this.#parts.desired);
    this.#ring ??= RING.allocateCaptureRing(RING_BYTES);
    const ring = this.#ring;
    const setTaken = (isTaken: boolean): void => {
      if (isTaken) {
        this.#requireFree();
        RING.clearCaptureRing(ring);
      }
      this.#isTaken = isTaken;
    };
    return new RunningCapture(this.#parts, options, { ring, ...filter }, setTaken);
  }

  #requireFree(): void {
    if (this.#isTaken) throw new WeirError('NOT_SUPPORTED', 'a capture is running already', 'End that one first.');
  }
}

class RunningCapture implements Capture {
  readonly #parts: CaptureParts;
  readonly #options: CaptureOptions;
  readonly #request: CaptureRequest;
  readonly #setTaken: (isTaken: boolean) => void;
  readonly #reader: RING.CaptureRingReader;
  readonly #wallOffsetMs: number;
  #endMs = Number.POSITIVE_INFINITY;
  #hasBegun = false;
  #isOver = false;
  #isClosed = false;
  #timer: NodeJS.Timeout | undefined;
  #wake: (() => void) | undefined;

  /** Packets of either interface, and of which in how many were counted as lost when that was last told. */
  readonly #packets = [0, 0];
  #lostTold = 0;
  /** The number of the packet in, in the ring and in the file. */
  #number = 0;
  #frame = 0;

  constructor(
    parts: CaptureParts,
    options: CaptureOptions,
    request: CaptureRequest,
    setTaken: (isTaken: boolean) => void,
  ) {
    this.#parts = parts;
    this.#options = options;
    this.#request = request;
    this.#setTaken = setTaken;
    this.#reader = new RING.CaptureRingReader(request.ring);
    this.#wallOffsetMs = Date.now() - parts.clock.nowMs();
  }

  async next(): Promise<Uint8Array | null> {
    if (!this.#hasBegun) return this.#begin();
    while (!this.#isOver && !this.#isClosed) {
      const blocks = this.#readBlocks();
      const isDue = this.#parts.clock.nowMs() >= this.#endMs;
      if (isDue || this.#packets[IN]! >= (this.#options.count ?? Number.POSITIVE_INFINITY)) {
        this.#isOver = true;
        blocks.push(...this.#statistics());
      } else if (this.#reader.lost > this.#lostTold) blocks.push(...this.#statistics());
      if (blocks.length > 0) return Buffer.concat(blocks);
      await this.#pause();
    }
    this.close();
    return null;
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#wake?.();
    const { path, log } = this.#parts;
    if (!this.#hasBegun) return;
    void path.capture(null).then(() => this.#setTaken(false));
    const [packetsIn, packetsOut] = this.#packets;
    const { lost } = this.#reader;
    log.info('capture-ended', `capture ended: ${packetsIn} packets in, ${packetsOut} out, ${lost} lost`, {
      in: packetsIn,
      out: packetsOut,
      lost,
    });
  }

  async #begin(): Promise<Uint8Array> {
    const { path, log, clock, version } = this.#parts;
    const { seconds, service, backend, client } = this.#options;
    this.#setTaken(true);
    this.#hasBegun = true;
    log.info('capture-begun', 'capture begun', { filter: { service, backend, client } });
    await path.capture(this.#request);
    if (seconds !== undefined) this.#endMs = clock.nowMs() + seconds * 1000;
    const { snapBytes } = this.#request;
    return Buffer.concat([
      sectionBlock(`weir ${version}`),
      interfaceBlock(LINK_RAW, snapBytes, 'in', 'packets as weir receives them'),
      interfaceBlock(LINK_RAW, snapBytes, 'out', 'packets as weir sends them'),
    ]);
  }

  #pause(): Promise<void> {
    return new Promise((resolve) => {
      this.#wake = resolve;
      this.#timer = setTimeout(resolve, Math.max(0, Math.min(POLL_MS, this.#endMs - this.#parts.clock.nowMs())));
    });
  }

  /** The blocks of what has come, up to a chunk and to the packets that were asked for. */
  #readBlocks(): Uint8Array[] {
    const reader = this.#reader;
    const { count = Number.POSITIVE_INFINITY } = this.#options;
    const blocks: Uint8Array[] = [];
    let bytes = 0;
    while (bytes < CHUNK_BYTES && reader.next()) {
      const isOut = reader.entry[RING.KIND] === RING.ENTRY_OUT;
      // What the last packet became is still of it.
      if (!isOut && this.#packets[IN]! >= count) break;
      const block = isOut ? this.#blockOut() : this.#blockIn();
      blocks.push(block);
      bytes += block.length;
    }
    return blocks;
  }

  #blockIn(): Uint8Array {
    const { entry, packet, atMs } = this.#reader;
    this.#packets[IN]! += 1;
    if (entry[RING.PACKET_NUMBER] !== this.#number) {
      this.#number = entry[RING.PACKET_NUMBER]!;
      this.#frame = this.#frames;
    }
    const isDatagram = entry[RING.KIND] === RING.ENTRY_DATAGRAM;
    const bytes = isDatagram ? this.#withOuterHeader() : packet;
    const original = entry[RING.ORIGINAL_BYTES]! + bytes.length - packet.length;
    const comment = `in: ${this.#describe()}${offloads(entry)}`;
    return packetBlock(IN, atMs + this.#wallOffsetMs, bytes, original, INBOUND, comment);
  }

  #blockOut(): Uint8Array {
    const { entry, packet, atMs } = this.#reader;
    this.#packets[OUT]! += 1;
    const number = entry[RING.PACKET_NUMBER]!;
    const from =
      number === this.#number
        ? `packet ${this.#frame}`
        : number === 0
          ? 'no packet of its own'
          : 'a packet that was lost';
    const comment = `out of ${from}${number === 0 ? this.#whose() : ''}${offloads(entry)}`;
    return packetBlock(OUT, atMs + this.#wallOffsetMs, packet, entry[RING.ORIGINAL_BYTES]!, OUTBOUND, comment);
  }

  /** Packets so far, as Wireshark numbers them: from 1. */
  get #frames(): number {
    return this.#packets[IN]! + this.#packets[OUT]!;
  }

  /** `web -> b1 10.2.0.11:8080, new, maglev, SYN_SENT` */
  #describe(): string {
    const { entry } = this.#reader;
    const outcome = entry[RING.OUTCOME]!;
    const [verdict, reason] = [outcome & 0xff, REASON_NAMES[(outcome >>> 8) & 0xff]!];
    const whose = this.#whose();
    switch (verdict) {
      case VERDICT.FORWARD:
        return whose === '' ? 'joined to another packet of its flow' : this.#describeFlow(outcome);
      case VERDICT.REPLY:
        return `answered by weir, ${reason}${whose}`;
      case VERDICT.PASS:
        return `passed on unchanged, ${reason}`;
      case VERDICT.DROP:
        return `dropped, ${reason}${whose}`;
      default:
        return `held: its first fragment has not come${whose}`;
    }
  }

  #describeFlow(outcome: number): string {
    const { entry } = this.#reader;
    const { snapshot, identities } = this.#parts.desired;
    const [service, backend] = [entry[RING.OUTCOME_SERVICE]!, entry[RING.OUTCOME_BACKEND]!];
    const row = backend * BACKEND_WORDS;
    const endpoint = formatEndpoint(
      snapshot.backends[row + BACKEND_ADDRESS]! >>> 0,
      snapshot.backends[row + BACKEND_PORT]!,
    );
    const arrow = ((outcome >>> 16) & 0xff) === VERDICT.DIRECTION_REPLY ? '<-' : '->';
    const isNew = (entry[RING.ENTRY_FLAGS]! & RING.ENTRY_NEW) !== 0;
    const flags = snapshot.services[service * SERVICE_WORDS + SERVICE_FLAGS]!;
    const state = STATE_NAMES[outcome >>> 24];
    const how = isNew ? `new, ${(flags & SERVICE_MAGLEV) !== 0 ? 'maglev' : 'random'}` : 'tracked';
    const names = `${identities.serviceName(service) ?? '?'} ${arrow} ${nameAndAddress(identities.backendName(backend) ?? '?', endpoint)}`;
    return `${names}, ${how}${state ? `, ${state}` : ''}`;
  }

  /** ` (web/b1)`, as far as it is known. */
  #whose(): string {
    const { entry } = this.#reader;
    const { identities } = this.#parts.desired;
    const service = identities.serviceName(entry[RING.OUTCOME_SERVICE]!);
    const backend = identities.backendName(entry[RING.OUTCOME_BACKEND]!);
    return service === undefined ? '' : ` (${service}${backend === undefined ? '' : `/${backend}`})`;
  }

  /** A datagram of a tunnel, of which the socket shows the payload alone, with headers as they may have been: the source port is 0. */
  #withOuterHeader(): Uint8Array {
    const { entry, packet } = this.#reader;
    const { tunnel } = this.#parts.desired.config;
    const bytes = new Uint8Array(ipv4.IPV4_HEADER_BYTES + UDP_HEADER_BYTES + packet.length);
    const view = new DataView(bytes.buffer);
    const total = bytes.length - packet.length + entry[RING.ORIGINAL_BYTES]!;
    ipv4.writeHeader(view, bytes, 0, total, ipv4.PROTO_UDP, entry[RING.PEER]!, tunnel.address?.word ?? 0);
    view.setUint16(ipv4.IPV4_HEADER_BYTES + 2, tunnel.port);
    view.setUint16(ipv4.IPV4_HEADER_BYTES + 4, total - ipv4.IPV4_HEADER_BYTES);
    bytes.set(packet, ipv4.IPV4_HEADER_BYTES + UDP_HEADER_BYTES);
    return bytes;
  }

  #statistics(): Uint8Array[] {
    const { lost } = this.#reader;
    this.#lostTold = lost;
    const nowMs = this.#parts.clock.nowMs() + this.#wallOffsetMs;
    // Which way those went that were lost is not known.
    return this.#packets.map((count, at) =>
      statisticsBlock(at, nowMs, count + (at === IN ? lost : 0), at === IN ? lost : 0),
    );
  }
}

/** What a packet is before the device has cut it, and has completed its checksum. */
function offloads(entry: Int32Array): string {
  const size = entry[RING.GSO]! >>> 8;
  const type = entry[RING.GSO]! & 0xff;
  const cut =
    type === 0 ? '' : `; a super-packet of ${type === vnet.GSO_UDP_L4 ? 'datagrams' : 'segments'} of ${size} bytes`;
  return `${cut}${(entry[RING.ENTRY_FLAGS]! & RING.ENTRY_PARTIAL) !== 0 ? '; checksum left to the device' : ''}`;
}

function compileFilter(options: CaptureOptions, { identities }: CaptureParts['desired']): Omit<CaptureRequest, 'ring'> {
  const { service, backend, client, snapBytes } = options;
  requireNames(identities, options);
  const services =
    service === undefined ? null : idsWhere(identities.serviceRows, (id) => identities.serviceName(id) === service);
  const slash = backend?.lastIndexOf('/') ?? -1;
  const isBackend = (id: number): boolean => {
    const identity = identities.backendById(id);
    if (identity === undefined) return false;
    if (slash >= 0 && identities.serviceName(identity.service) !== backend!.slice(0, slash)) return false;
    const [address] = formatEndpoint(identity.address >>> 0, 0).split(':');
    return [identity.name, address, `${address}:${identity.port}`].includes(backend!.slice(slash + 1));
  };
  const wanted = client === undefined ? null : parseClient(client);
  if (wanted === undefined)
    throw new WeirError('USAGE', `"${client}" is no address, address:port or prefix`, 'Correct it.');
  return {
    services,
    backends: backend === undefined ? null : idsWhere(identities.backendRows, isBackend),
    client: wanted,
    snapBytes: snapBytes ?? MAX_PACKET_BYTES,
  };
}

function idsWhere(rows: number, isWanted: (id: number) => boolean): Int32Array {
  return Int32Array.from(Array.from({ length: rows }, (_, id) => id).filter(isWanted));
}
