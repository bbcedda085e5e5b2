import { readdirSync, readFileSync } from 'node:fs';
import t from 'tap';
import { parse } from 'yaml';
import { type FixtureFile, inModes, runCase } from './fixture.js';

const folder = new URL('../fixtures/', import.meta.url);

for (const name of readdirSync(folder)
  .filter((file) => file.endsWith('.yaml'))
  .sort()) {
  const file = parse(readFileSync(new URL(name, folder), 'utf8')) as FixtureFile;
  for (const variant of inModes(file)) {
    t.test(variant.title, async (t) => {
      for (const item of variant.cases) t.same(await runCase(variant, item), [], item.name);
    });
  }
}
