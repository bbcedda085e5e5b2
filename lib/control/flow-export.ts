import type { Clock } from '../base/clock.js';
import { EXPIRES } from '../conntrack/record.js';
import type { TableReader } from '../conntrack/table-reader.js';
import { END_LINE, formatFlowLine, formatHeader } from './flow-lines.js';
import { type FlowFilter, type FlowNames, matchRecords } from './flows.js';

const CHUNK_CHARS = 32 * 1024;

/**
 * The connections that live, as lines another weir can import: header, flows, end. Streamed as `formatFlows` is. A slow reader
 * gets times that are right when their line is made. An empty piece: a rest would be welcome.
 */
export function* exportFlows(
  readers: readonly TableReader[],
  names: FlowNames,
  clock: Clock,
  filter: FlowFilter,
  release: string,
): Generator<string, void, void> {
  let chunk = `${formatHeader(release)}\n`;
  for (const reader of readers) {
    for (const record of matchRecords(reader, names, clock.nowMs(), filter)) {
      if (record === null) {
        yield '';
        continue;
      }
      const nowMs = clock.nowMs();
      if (reader.doubles[EXPIRES]! <= nowMs) continue;
      chunk += `${formatFlowLine(reader, 0, nowMs)}\n`;
      if (chunk.length < CHUNK_CHARS) continue;
      yield chunk;
      chunk = '';
    }
  }
  yield `${chunk}${END_LINE}\n`;
}
