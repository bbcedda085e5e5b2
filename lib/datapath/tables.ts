import type { TableMemory } from '../conntrack/memory.js';
import { type ImageSizes, imageBytes, tablesOf } from '../conntrack/state-image.js';
import { mapFile } from '../io/mapped-file.js';

/** The memory of the two flow tables. */
export interface Tables {
  readonly tcp: TableMemory;
  readonly any: TableMemory;
}

/** The same, in a state file that each thread maps for itself. */
export interface MappedTables extends ImageSizes {
  readonly fd: number;
}

/** The tables, wherever they are; for one thread. @throws WeirError STATE_FILE */
export function attachTables(places: Tables | MappedTables): Tables {
  return 'fd' in places ? tablesOf(mapFile(places.fd, imageBytes(places)), places) : places;
}
