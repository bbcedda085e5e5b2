import fc from 'fast-check';
import t from 'tap';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import {
  checkGeneve,
  type GeneveContent,
  makeGeneveContent,
  writeGeneve,
  writeGeneveWithVip,
  writeInnerEthernet,
} from '../../lib/wire/geneve.js';
import { dsrOption, type GeneveFields, geneve, type Option } from '../fixtures/geneve.js';
import { tcp } from '../fixtures/packets.js';

const INNER = tcp({ src: '10.1.0.2', sport: 40000, dst: '10.2.0.11', dport: 8080, flags: 'S' });
const OURS = dsrOption('200.96.0.10', 80);
const FOREIGN: Option = { class: 0x0103, type: 0x03, data: new Uint8Array(4) };
const EMPTY: Option = { class: 0xffff, type: 0x7f, data: new Uint8Array(0) };
const CRITICAL: Option = { class: 0x014b, type: 0x82, data: new Uint8Array(8) };

const BEFORE = 16;

/** The verdict by name, '' for none, on a datagram among other bytes. */
function judge(payload: Uint8Array, canary = 0xa5): { reason: string; content: GeneveContent } {
  const bytes = new Uint8Array(BEFORE + payload.length + 64).fill(canary);
  bytes.set(payload, BEFORE);
  const content = makeGeneveContent();
  const reason = checkGeneve(bytes, new DataView(bytes.buffer), BEFORE, payload.length, content);
  return { reason: reason === 0 ? '' : REASON_NAMES[reason]!, content };
}

t.test('the bytes that are sent', async (t) => {
  const bytes = new Uint8Array(34).fill(0xee);
  const view = new DataView(bytes.buffer);
  writeGeneveWithVip(bytes, view, 0, 0x6558, 2, 0x0a60000a, 443);
  writeInnerEthernet(view, 20);
  t.equal(
    Buffer.from(bytes).toString('hex'),
    '0340655800000200' + '014b81020a60000a01bb0000' + '020000000002' + '020000000001' + '0800',
  );
  bytes.fill(0xee);
  writeGeneve(view, 0, 0x0800, 0xffffff);
  t.equal(Buffer.from(bytes.subarray(0, 9)).toString('hex'), '00000800ffffff00ee');
});

t.test('options of others are skipped, before and after', async (t) => {
  for (const protocol of [0x6558, 0x0800]) {
    for (const options of [[], [OURS], [FOREIGN, OURS], [OURS, FOREIGN], [EMPTY, FOREIGN, OURS, EMPTY], [FOREIGN]]) {
      const payload = geneve({ options, protocol, vni: 0xabcdef }, INNER);
      const { reason, content } = judge(payload);
      const hasVip = options.includes(OURS);
      t.equal(reason, '');
      t.same(content, {
        inner: BEFORE + payload.length - INNER.length,
        innerLength: INNER.length,
        vni: 0xabcdef,
        hasVip,
        vip: hasVip ? 0xc860000a | 0 : 0,
        vipPort: hasVip ? 80 : 0,
      });
    }
  }
  t.match(
    judge(geneve({ options: [dsrOption('10.0.0.1', 1), OURS] }, INNER)).content,
    { vipPort: 1 },
    'the first counts',
  );
  t.match(judge(geneve({ options: [{ ...OURS, type: 0x01 }] }, INNER)), { reason: '', content: { hasVip: false } });
  t.match(judge(geneve({ options: [{ ...FOREIGN, class: 0x014b }, OURS] }, INNER)), { content: { hasVip: true } });
});

t.test('what is refused', async (t) => {
  const short = { ...OURS, data: new Uint8Array(4) };
  const long = { ...OURS, data: new Uint8Array(12) };
  const cases: ReadonlyArray<readonly [why: string, fields: GeneveFields, inner: Uint8Array, reason: string]> = [
    ['version 1', { version: 1 }, INNER, 'geneve-malformed'],
    ['version 3', { version: 3, options: [OURS] }, INNER, 'geneve-malformed'],
    ['OAM', { oam: true, options: [OURS] }, INNER, 'geneve-malformed'],
    ['an ARP type', { protocol: 0x0806 }, INNER, 'geneve-malformed'],
    ['IPv6 inside', { protocol: 0x86dd }, INNER, 'geneve-malformed'],
    ['ARP in a frame', { ethertype: 0x0806 }, INNER, 'geneve-malformed'],
    ['a VLAN tag', { ethertype: 0x8100 }, INNER, 'geneve-malformed'],
    ['options past the end', { optionWords: 63 }, INNER, 'geneve-malformed'],
    ['options that end within one', { options: [OURS], optionWords: 2 }, INNER, 'geneve-malformed'],
    ['an option past the options', { options: [EMPTY, FOREIGN], optionWords: 2 }, INNER, 'geneve-malformed'],
    ['ours, too short', { options: [short] }, INNER, 'geneve-malformed'],
    ['ours, too long', { options: [long] }, INNER, 'geneve-malformed'],
    ['nothing inside', {}, new Uint8Array(0), 'geneve-malformed'],
    ['19 bytes inside', {}, INNER.subarray(0, 19), 'geneve-malformed'],
    ['19 bytes of IP', { protocol: 0x0800 }, INNER.subarray(0, 19), 'geneve-malformed'],
    ['an unknown critical one', { options: [CRITICAL] }, INNER, 'geneve-critical-option'],
    ['before ours', { options: [CRITICAL, OURS] }, INNER, 'geneve-critical-option'],
    ['after ours', { options: [OURS, CRITICAL] }, INNER, 'geneve-critical-option'],
    ['though C is clear', { options: [CRITICAL], critical: false }, INNER, 'geneve-critical-option'],
    ['C without a critical one', { options: [FOREIGN], critical: true }, INNER, ''],
    ['20 bytes inside', {}, INNER.subarray(0, 20), ''],
  ];
  for (const [why, fields, inner, reason] of cases) t.equal(judge(geneve(fields, inner)).reason, reason, why);
  const whole = geneve({ options: [OURS] }, INNER);
  for (let length = 0; length < whole.length - INNER.length + 20; length++)
    t.equal(judge(whole.subarray(0, length)).reason, 'geneve-malformed', `${length} bytes`);
});

t.test('what is written is read back', async () => {
  fc.assert(
    fc.property(
      fc.boolean(),
      fc.boolean(),
      fc.nat(0xffffff),
      fc.integer(),
      fc.nat(65535),
      (frame, option, vni, vip, port) => {
        const bytes = new Uint8Array(34 + INNER.length);
        const view = new DataView(bytes.buffer);
        const protocol = frame ? 0x6558 : 0x0800;
        if (option) writeGeneveWithVip(bytes, view, 0, protocol, vni, vip, port);
        else writeGeneve(view, 0, protocol, vni);
        let inner = option ? 20 : 8;
        if (frame) {
          writeInnerEthernet(view, inner);
          inner += 14;
        }
        bytes.set(INNER, inner);
        const content = makeGeneveContent();
        const found = {
          inner,
          innerLength: INNER.length,
          vni,
          hasVip: option,
          vip: option ? vip : 0,
          vipPort: option ? port : 0,
        };
        const reason = checkGeneve(bytes, view, 0, inner + INNER.length, content);
        return reason === 0 && JSON.stringify(content) === JSON.stringify(found);
      },
    ),
  );
});

t.test('nothing outside the datagram is read, whatever it says', async (t) => {
  const option = fc.record({
    class: fc.constantFrom(0x014b, 0x0103, 0),
    type: fc.constantFrom(0x81, 0x01, 0x80),
    data: fc.constantFrom(0, 4, 8, 124).map((length) => new Uint8Array(length)),
  });
  const mutant = fc
    .tuple(
      fc.array(option, { maxLength: 3 }),
      fc.constantFrom(0x6558, 0x0800),
      fc.array(fc.tuple(fc.nat(60), fc.nat(255)), { maxLength: 4 }),
      fc.nat(100),
    )
    .map(([options, protocol, changes, cut]) => {
      const whole = geneve({ options, protocol }, INNER);
      const payload = whole.slice(0, Math.max(0, whole.length - cut));
      for (const [at, byte] of changes) if (at < payload.length) payload[at] = byte;
      return payload;
    });
  const reasons = new Set<string>();
  fc.assert(
    fc.property(fc.oneof(mutant, fc.uint8Array({ maxLength: 80 })), (payload) => {
      const one = judge(payload, 0x00);
      const other = judge(payload, 0xff);
      reasons.add(one.reason);
      if (one.reason !== other.reason) return false;
      if (one.reason !== '') return true;
      const { inner, innerLength } = one.content;
      return (
        JSON.stringify(one.content) === JSON.stringify(other.content) &&
        innerLength >= 20 &&
        inner >= BEFORE + 8 &&
        inner + innerLength === BEFORE + payload.length
      );
    }),
    { numRuns: 20_000 },
  );
  t.same([...reasons].sort(), ['', 'geneve-critical-option', 'geneve-malformed'], 'all verdicts are met');
});
