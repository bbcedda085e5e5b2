import { type MessagePort, receiveMessageOnPort, workerData } from 'node:worker_threads';
import { WeirError } from '../base/errors.js';
import { systemRandom } from '../base/random.js';
import { adoptSome, RecordRows } from '../conntrack/adopt.js';
import { CAUSE_FLUSHED, EventWriter } from '../conntrack/events.js';
import { FlowTable } from '../conntrack/flow-table.js';
import { GarbageCollector } from '../conntrack/gc.js';
import { bootClock } from '../io/boot-clock.js';
import { ErrorSocket } from '../io/error-socket.js';
import { openDevice } from '../io/open.js';
import { Gateway } from './gateway.js';
import { runLoop } from './loop.js';
import type { FromDataPath, ToDataPath } from './messages.js';
import { Node } from './node.js';
import type { Snapshot } from './snapshot.js';
import { attachTables, type MappedTables, type Tables } from './tables.js';
import { Tap } from './tap.js';

/**
 * The data path's thread. It never returns to its event loop: messages are taken synchronously from the port, after the main
 * thread has raised `signal` and woken the device; nothing here may await or set a timer.
 */
export interface WorkerSetup {
  readonly port: MessagePort;
  /** Word 0 counts the messages posted. */
  readonly signal: Int32Array;
  readonly role: 'gateway' | 'node';
  readonly fd: number;
  /** Of a node: the socket that tunnels end at. */
  readonly tunnelFd?: number;
  readonly wakeFd: number;
  readonly vnetHeader: boolean;
  readonly udpSegmentation: boolean;
  readonly mtu: number;
  readonly engine: 'auto' | 'io_uring' | 'readwrite';
  readonly tables: Tables | MappedTables;
  /** Where what happens to connections is told (conntrack/events.ts). */
  readonly events: SharedArrayBuffer;
  readonly gcIntervalMs: number | null;
  readonly snapshot: Snapshot;
  readonly recovering: boolean;
  readonly stats: Float64Array;
}

/** How long packets may wait for records to be taken in. */
const ADOPT_MS = 0.5;

/** Clients counted while packets wait: well under 0.5 ms. */
const AFFINITY_SLICE = 4096;

const setup = workerData as WorkerSetup;

function post(message: FromDataPath): void {
  setup.port.postMessage(message);
}

function main(): void {
  const clock = bootClock();
  const { device, note } = openDevice(setup);
  const errors = setup.role === 'gateway' ? new ErrorSocket() : undefined;
  try {
    const tables = attachTables(setup.tables);
    const events = new EventWriter(setup.events);
    const tcp = new FlowTable(tables.tcp, events);
    const any = new FlowTable(tables.any, events);
    const tap = new Tap(device);
    const parts = {
      tcp,
      any,
      output: tap,
      random: systemRandom(),
      stats: setup.stats,
      ...(setup.recovering ? { recoveringSince: clock.nowMs() } : {}),
    };
    const pipeline =
      errors === undefined
        ? new Node(parts, (address, port, protocol) => post({ type: 'endpoint', address, port, protocol }))
        : new Gateway({ ...parts, errors });
    tap.attach(pipeline);
    pipeline.use(setup.snapshot);
    const collector = new GarbageCollector([tcp, any], clock.nowMs(), setup.gcIntervalMs);
    const problem = setup.snapshot.tunnel.address === 0 ? '' : (errors?.problem ?? '');
    post({ type: 'ready', features: device.features, note: problem === '' ? note : `${note}; ${problem}` });

    let heard = 0;
    const { signal, stats } = setup;
    const handle = (): boolean => {
      heard = Atomics.load(signal, 0);
      for (;;) {
        const message = (receiveMessageOnPort(setup.port) as { message: ToDataPath } | undefined)?.message;
        if (message === undefined) return true;
        switch (message.type) {
          case 'snapshot':
            pipeline.use(message.snapshot);
            post({ type: 'applied', version: message.snapshot.version });
            break;
          case 'flush':
            post({
              type: 'flushed',
              id: message.id,
              count: flush(message.table === 'tcp' ? tcp : any, message, clock.nowMs()),
            });
            break;
          case 'adopt': {
            const table = message.table === 'tcp' ? tcp : any;
            const outcomes = adoptSome(table, new RecordRows(message.records), clock, ADOPT_MS);
            post({ type: 'adopted', id: message.id, outcomes });
            break;
          }
          case 'capture':
            tap.use(message.request);
            break;
          case 'recall': {
            const recollection = pipeline instanceof Gateway ? pipeline.recall(message.query) : null;
            post({ type: 'recalled', id: message.id, recollection });
            break;
          }
          case 'affinity': {
            const clients = new Map<number, number>();
            const end =
              pipeline instanceof Gateway
                ? pipeline.countAffinity(message.end, AFFINITY_SLICE, clock.nowMs(), clients)
                : 0;
            post({ type: 'affinity', id: message.id, slice: { clients, end } });
            break;
          }
          case 'stop':
            return false;
        }
      }
    };
    runLoop({
      device,
      pipeline,
      tap,
      collector,
      clock,
      stats,
      control: { pending: () => Atomics.load(signal, 0) !== heard, handle },
    });
  } finally {
    errors?.close();
    device.close();
  }
}

/** Removes the records that still hold what the main thread saw in them. */
function flush(table: FlowTable, { records, commits }: Extract<ToDataPath, { type: 'flush' }>, nowMs: number): number {
  let count = 0;
  for (let i = 0; i < records.length; i++) {
    if (table.generation(records[i]!) !== commits[i]) continue;
    table.remove(records[i]!, CAUSE_FLUSHED, nowMs);
    count++;
  }
  return count;
}

try {
  main();
  post({ type: 'stopped' });
} catch (error) {
  const known = error instanceof WeirError;
  post({
    type: 'failed',
    code: known ? error.code : 'DEVICE_FAILED',
    message: known ? error.message : `the data path stopped: ${(error as Error).stack ?? String(error)}`,
    remedy: known ? error.remedy : 'This is a bug in weir; please report it.',
  });
}
setup.port.close();
