import { CLIENT, RECORD_DOUBLES, RECORD_WORDS, RX_BYTES, TX_BYTES } from '../../conntrack/record.js';
import type { Records, TableReader } from '../../conntrack/table-reader.js';
import { type Census, censusInSteps } from '../census.js';
import type { ClientsView } from './live-view.js';
import { TopClients } from './top-clients.js';

/** What one walk over the tables finds. */
export interface Survey {
  readonly census: Census;
  readonly clients: ClientsView;
}

/** A census that looks at clients as well, in the same steps. */
export function* surveyInSteps(
  readers: readonly TableReader[],
  nowMs: number,
  backendRows: number,
): Generator<void, Survey> {
  const clients = new TopClients();
  const visit = ({ words, doubles }: Records, record: number): void => {
    const double = record * RECORD_DOUBLES;
    clients.add(words[record * RECORD_WORDS + CLIENT]!, doubles[double + TX_BYTES]! + doubles[double + RX_BYTES]!);
  };
  const census = yield* censusInSteps(readers, nowMs, backendRows, (reader, first, count) =>
    reader.visitLive(first, count, nowMs, visit),
  );
  return { census, clients: clients.view() };
}
