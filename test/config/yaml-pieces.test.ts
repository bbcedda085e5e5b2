import { deepStrictEqual } from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import * as fc from 'fast-check';
import t from 'tap';
import { parseConfig } from '../../lib/config/load.js';
import { YamlPieces } from '../../lib/config/yaml-pieces.js';
import { YamlSource } from '../../lib/config/yaml-source.js';

const MEMBER = [
  '  - name: web',
  '    address: 10.96.0.1',
  '    port: 80',
  '    backends:',
  '      - { address: 10.2.0.1, port: 8080 }',
  '      - address: 10.2.0.2',
  '        port: 8080',
];

/** Lines of configurations, and lines that change what those around them mean. */
const LINES = [
  'services:',
  'services: []',
  'services: # all of them',
  ' services:',
  'admin: { listen: off }',
  'admin:',
  '# a comment',
  '  # another',
  '',
  '   ',
  '- name: flush',
  '    - deeper',
  ' - nearer',
  '  -',
  '  - ',
  '  - [a, b',
  '  - "quoted',
  "  - it's",
  "    'x",
  '    "',
  '  ]',
  '    }',
  '    {',
  '{',
  '}',
  'x: {',
  '"',
  '  - |',
  '  - >-',
  '    note: |1',
  '   - in a block of text',
  '  - &a name',
  '  - *a',
  '    tag: !!str 1',
  '---',
  '...',
  '%YAML 1.2',
  '\tx: 1',
  '    port: 80\r',
  '  - name: web',
  '  - - nested',
  '  - ? key',
  '    : value',
  '  x: 1',
  ' x: 1',
  'x: "',
  '"services":',
  'services: |',
  '    a: b: c',
  '    name: again',
  '    __proto__: 1',
  '  - plain',
  '    going on',
  '  - {}',
  '  - null',
  '  - {name: a} # and {',
];

/** What the whole text says, undefined if anything is wrong with it. */
function whole(text: string): unknown {
  const { value, syntaxErrors, faults } = new YamlSource(text);
  return syntaxErrors.length > 0 || faults.length > 0 ? undefined : value;
}

t.test('read in pieces, a text says what it says whole, or nothing', async (t) => {
  let told = 0;
  const line = fc.constantFrom(...LINES);
  const block = fc.oneof(
    { weight: 5, arbitrary: fc.constant(MEMBER) },
    { weight: 1, arbitrary: fc.array(line, { maxLength: 3 }) },
  );
  const text = fc
    .tuple(
      fc.array(line, { maxLength: 2 }),
      fc.array(block, { maxLength: 5 }),
      fc.array(line, { maxLength: 2 }),
      fc.boolean(),
    )
    .map(
      ([head, blocks, tail, isEnded]) =>
        [...head, 'services:', ...blocks.flat(), ...tail].join('\n') + (isEnded ? '\n' : ''),
    );
  const pieces = new YamlPieces();
  fc.assert(
    fc.property(text, (text) => {
      const read = pieces.read(text);
      if (read === undefined) return;
      told++;
      deepStrictEqual(read, whole(text));
    }),
    { numRuns: 5000 },
  );
  t.ok(told > 300, `${told} of 5000 were read in pieces`);
});

t.test('a list that only looks like that of the services is left to the whole', async (t) => {
  const list = ['services:', ...MEMBER].join('\n');
  for (const text of [
    `{\n${list}\n}\n`,
    ` # a map\n\n  {\n${list}\n}\n`,
    `services: []\nx: {\n${list}\n}\n`,
    `services: []\nseed: "\n${list.replaceAll('"', '')}\n"\n`,
    `services: []\nseed: '\n${list}\n'\n`,
    `seed: members-of-services\n${list}\n`,
  ]) {
    t.equal(new YamlPieces().read(text), undefined, text.slice(0, 30));
  }
  t.strictSame(new YamlPieces().read(`# {\n${list}\n`), whole(`# {\n${list}\n`));
});

t.test('any change of a line is seen', async (t) => {
  const example = readFileSync('conf/weir.yaml', 'utf8');
  const pieces = new YamlPieces();
  const services = Array.from({ length: 8 }, (_, i) =>
    MEMBER.join('\n')
      .replace('web', `s${i}`)
      .replace('0.1', `0.${i + 1}`),
  );
  const base = `${example.slice(0, example.indexOf('\nservices:'))}\nservices:\n${services.join('\n')}\n`;
  fc.assert(
    fc.property(fc.nat(), fc.constantFrom(...LINES), fc.boolean(), (n, line, isReplaced) => {
      const lines = base.split('\n');
      lines.splice(n % lines.length, isReplaced ? 1 : 0, line);
      const text = lines.join('\n');
      deepStrictEqual(parseConfig(text, pieces), parseConfig(text));
    }),
    { numRuns: 500 },
  );
  t.pass('in every one of 500');
});

t.test('what is known is not parsed again; what is not in the last text is forgotten', async (t) => {
  const pieces = new YamlPieces();
  const first = pieces.read(`services:\n${MEMBER.join('\n')}\n`) as { services: object[] };
  const second = pieces.read(`services:\n  - { name: new }\n${MEMBER.join('\n')}\nadmin: {}\n`) as {
    services: object[];
  };
  t.equal(second.services[1], first.services[0]);
  t.strictSame(Object.keys(second), ['services', 'admin']);
  pieces.read('services:\n  - { name: new }\n');
  const third = pieces.read(`services:\n${MEMBER.join('\n')}\n`) as { services: object[] };
  t.not(third.services[0], first.services[0]);
  t.strictSame(third, first);
});
