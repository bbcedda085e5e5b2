import { maglevTable } from '../balance/maglev.js';
import { WeirError } from '../base/errors.js';
import { keyFromString } from '../base/hash.js';
import { requireConfig } from '../config/load.js';
import { print, printJson } from './output.js';
import { renderTable } from './render.js';

interface Share {
  readonly backend: string;
  readonly weight: number;
  readonly slots: number;
  /** Of the table. */
  readonly share: number;
  /** Slots of others that would change owner if it left. */
  readonly disturbed: number;
}

/** `weir maglev` */
export async function maglev(
  name: string,
  { config: file, output }: { config: string; output: 'table' | 'json' },
): Promise<void> {
  const config = requireConfig(file);
  const service = config.services.find((each) => each.name === name);
  if (service === undefined) {
    const names = config.services.map((each) => each.name).join(', ');
    throw new WeirError('USAGE', `${file} has no service "${name}"`, `It has ${names || 'none'}.`);
  }
  if (service.algorithm !== 'maglev') console.error(`weir: ${name} is ${service.algorithm}; with maglev it would be:`);
  const size = config.maglev.tableSize;
  const key = keyFromString(config.seed);
  const backends = service.backends
    .filter(({ weight }) => weight > 0)
    .map(({ name, address, port, weight }) => ({ name, address: address.word, port, weight }));
  const owners = (of: typeof backends): string[] => {
    if (of.length === 0) return [];
    return Array.from(maglevTable(of, service.protocolNumber, size, key), (i) => of[i]!.name);
  };
  const table = owners(backends);
  const shares = backends.map(({ name, weight }): Share => {
    const without = owners(backends.filter((each) => each.name !== name));
    const slots = table.filter((owner) => owner === name).length;
    const disturbed = without.filter((owner, slot) => table[slot] !== name && table[slot] !== owner).length;
    return { backend: name, weight, slots, share: slots / size, disturbed };
  });
  if (output === 'json') await printJson({ service: name, size, backends: shares });
  else await print(renderShares(shares, size));
}

function renderShares(shares: readonly Share[], size: number): string {
  const rows = shares.map(({ backend, weight, slots, share, disturbed }) => [
    backend,
    weight,
    slots,
    `${(share * 100).toFixed(2)} %`,
    '#'.repeat(Math.round(share * 40)),
    `${((disturbed / size) * 100).toFixed(2)} %`,
  ]);
  return renderTable(['BACKEND', 'WEIGHT', 'SLOTS', 'SHARE', '', 'OTHERS MOVED IF IT LEFT'], rows);
}
