import { MessageChannel, type MessagePort, Worker } from 'node:worker_threads';
import { type ErrorCode, WeirError } from '../base/errors.js';
import type { DeviceFeatures } from '../io/device.js';
import { createWake, type Wake } from '../io/wake.js';
import type { AskForEndpoint } from './endpoints.js';
import type { AffinitySlice, FromDataPath, ToDataPath } from './messages.js';
import type { Recollection, RecollectionQuery } from './recollection.js';
import type { Snapshot } from './snapshot.js';
import { allocateStats } from './stats.js';
import type { MappedTables, Tables } from './tables.js';
import type { CaptureRequest } from './tap.js';
import type { WorkerSetup } from './worker.js';

/** How long a data path may take to leave before its thread is ended. */
const STOP_MS = 1000;

const NO_RECORDS = new Int32Array(0);

export interface DataPathOptions {
  readonly role: 'gateway' | 'node';
  /** An open TUN device; stays the caller's to close, after `stop`. */
  readonly fd: number;
  /** Of a node: the socket that tunnels end at; likewise. */
  readonly tunnelFd?: number;
  readonly vnetHeader: boolean;
  readonly udpSegmentation: boolean;
  readonly mtu: number;
  readonly engine: 'auto' | 'io_uring' | 'readwrite';
  readonly tables: Tables | MappedTables;
  /** Memory of the ring that tells what happens to connections. */
  readonly events: SharedArrayBuffer;
  /** `conntrack.gc.interval` when it is fixed. */
  readonly gcIntervalMs?: number;
  readonly snapshot: Snapshot;
  /** The table begins empty while connections may be under way: pick replies up for `conntrack.recovery`. */
  readonly recovering: boolean;
  /** The data path has ended by itself; called at most once, and not after `stop`. */
  readonly onFailure: (error: WeirError) => void;
  /** Traffic has taught a node an endpoint; not called after `stop`. */
  readonly onEndpoint?: AskForEndpoint;
}

const NO_SLICE: AffinitySlice = { clients: new Map(), end: 0 };

/** Starts the data path in its own thread; resolves once its device is open and packets flow. */
export async function startDataPath(options: DataPathOptions): Promise<DataPath> {
  const wake = createWake();
  const { port1, port2 } = new MessageChannel();
  const { onFailure, onEndpoint, gcIntervalMs, ...rest } = options;
  const stats = allocateStats();
  const signal = new Int32Array(new SharedArrayBuffer(4));
  const setup: WorkerSetup = {
    ...rest,
    port: port2,
    signal,
    wakeFd: wake.fd,
    gcIntervalMs: gcIntervalMs ?? null,
    stats,
  };
  const worker = new Worker(new URL('./worker.js', import.meta.url), { workerData: setup, transferList: [port2] });
  const path = new DataPath(worker, port1, wake, signal, stats, { onFailure, onEndpoint });
  try {
    await path.ready;
  } catch (error) {
    await path.stop();
    throw error;
  }
  return path;
}

/** The main thread's hold on the running data path. */
export class DataPath {
  /** STAT_* rows, live. */
  readonly stats: Float64Array;
  /** Settles when the device is open, or cannot be. */
  readonly ready: Promise<void>;
  features: DeviceFeatures = { engine: '', vnetHeader: false, udpSegmentation: false };
  /** What the engine has to say about how it was chosen. */
  note = '';

  readonly #worker: Worker;
  readonly #port: MessagePort;
  readonly #wake: Wake;
  readonly #signal: Int32Array;
  readonly #onFailure: (error: WeirError) => void;
  readonly #onEndpoint: AskForEndpoint | undefined;
  readonly #exited: Promise<void>;
  readonly #applied = new Map<number, () => void>();
  /** By the number of a question: takes its answer, or without one settles for none. */
  readonly #asked = new Map<number, (answer?: unknown) => void>();
  #isReady = false;
  #isEnding = false;
  #requestId = 0;
  #settleReady!: { resolve: () => void; reject: (error: WeirError) => void };

  constructor(
    worker: Worker,
    port: MessagePort,
    wake: Wake,
    signal: Int32Array,
    stats: Float64Array,
    { onFailure, onEndpoint }: { onFailure: (error: WeirError) => void; onEndpoint: AskForEndpoint | undefined },
  ) {
    this.#worker = worker;
    this.#port = port;
    this.#wake = wake;
    this.#signal = signal;
    this.#onFailure = onFailure;
    this.#onEndpoint = onEndpoint;
    this.stats = stats;
    this.ready = new Promise((resolve, reject) => {
      this.#settleReady = { resolve, reject };
    });
    port.on('message', (message: FromDataPath) => this.#hear(message));
    worker.on('error', (error) => this.#fail(new WeirError('DEVICE_FAILED', `the data path crashed: ${error.stack}`)));
    this.#exited = new Promise((resolve) => {
      worker.on('exit', () => {
        this.#fail(new WeirError('DEVICE_FAILED', 'the data path ended unexpectedly'));
        resolve();
      });
    });
  }

  /** Puts a snapshot to use; resolves when packets are handled by it. */
  publish(snapshot: Snapshot): Promise<void> {
    return new Promise((resolve) => {
      if (this.#isEnding) return resolve();
      this.#applied.set(snapshot.version, resolve);
      this.#post({ type: 'snapshot', snapshot });
    });
  }

  /** Removes records that still hold the generation seen; resolves to how many did. */
  flush(table: 'tcp' | 'any', records: Int32Array, commits: Int32Array): Promise<number> {
    return this.#ask<number>(0, (id) => ({ type: 'flush', id, table, records, commits }));
  }

  /** Captures packets from now on, or no more (null); resolves when it is so. */
  async capture(request: CaptureRequest | null): Promise<void> {
    if (this.#isEnding) return;
    this.#post({ type: 'capture', request });
    await this.answers();
  }

  /** Resolves when the data path has come round; never, when it does not any more. */
  async answers(): Promise<void> {
    await this.flush('tcp', NO_RECORDS, NO_RECORDS);
  }

  /**
   * Has records taken in that were tracked elsewhere: the first of them, as many as can be without keeping packets waiting.
   *
   * @param records the whole of a buffer, RECORD_WORDS each
   * @returns what became of those (conntrack/adopt.ts); empty when the data path has ended
   */
  adopt(table: 'tcp' | 'any', records: Int32Array): Promise<Uint8Array> {
    return this.#ask(new Uint8Array(0), (id) => ({ type: 'adopt', id, table, records }));
  }

  /** What a gateway knows besides tables and snapshot that bears on a packet; null: a node, or the data path has ended. */
  recall(query: RecollectionQuery): Promise<Recollection | null> {
    return this.#ask<Recollection | null>(null, (id) => ({ type: 'recall', id, query }));
  }

  /** The clients that affinity remembers, counted by the id of their backend; in slices, so that packets do not wait. */
  async countAffinity(): Promise<Map<number, number>> {
    const clients = new Map<number, number>();
    let end = Number.POSITIVE_INFINITY;
    while (end > 0) {
      const before = end;
      const slice = await this.#ask(NO_SLICE, (id) => ({ type: 'affinity', id, end: before }));
      for (const [backend, count] of slice.clients) clients.set(backend, (clients.get(backend) ?? 0) + count);
      end = slice.end;
    }
    return clients;
  }

  /** Ends the thread after its current batch. Idempotent. */
  async stop(): Promise<void> {
    if (!this.#isEnding) {
      this.#isEnding = true;
      this.#post({ type: 'stop' });
    }
    const timer = setTimeout(() => void this.#worker.terminate(), STOP_MS);
    await this.#exited;
    clearTimeout(timer);
    this.#port.close();
    this.#wake.close();
    this.#releaseWaiting();
  }

  /** Whoever waits for an answer will not get one. */
  #releaseWaiting(): void {
    for (const resolve of this.#applied.values()) resolve();
    for (const settle of this.#asked.values()) settle();
    this.#applied.clear();
    this.#asked.clear();
  }

  /** @param otherwise the answer of a data path that has ended */
  #ask<T>(otherwise: T, message: (id: number) => ToDataPath): Promise<T> {
    if (this.#isEnding) return Promise.resolve(otherwise);
    return new Promise((resolve) => {
      const id = ++this.#requestId;
      this.#asked.set(id, (answer = otherwise) => resolve(answer as T));
      this.#post(message(id));
    });
  }

  #answer(id: number, answer: unknown): void {
    this.#asked.get(id)?.(answer);
    this.#asked.delete(id);
  }

  #post(message: ToDataPath): void {
    this.#port.postMessage(message);
    Atomics.add(this.#signal, 0, 1);
    this.#wake.wake();
  }

  #hear(message: FromDataPath): void {
    switch (message.type) {
      case 'ready':
        this.features = message.features;
        this.note = message.note;
        this.#isReady = true;
        this.#settleReady.resolve();
        break;
      case 'applied':
        this.#applied.get(message.version)?.();
        this.#applied.delete(message.version);
        break;
      case 'flushed':
        this.#answer(message.id, message.count);
        break;
      case 'adopted':
        this.#answer(message.id, message.outcomes);
        break;
      case 'recalled':
        this.#answer(message.id, message.recollection);
        break;
      case 'affinity':
        this.#answer(message.id, message.slice);
        break;
      case 'endpoint':
        if (!this.#isEnding) this.#onEndpoint?.(message.address, message.port, message.protocol);
        break;
      case 'failed':
        this.#fail(new WeirError(message.code as ErrorCode, message.message, message.remedy));
        break;
      case 'stopped':
        break;
    }
  }

  #fail(error: WeirError): void {
    if (this.#isEnding) return;
    this.#isEnding = true;
    this.#releaseWaiting();
    if (this.#isReady) this.#onFailure(error);
    else this.#settleReady.reject(error);
  }
}
