import fc from 'fast-check';
import t from 'tap';
import {
  adjustFull,
  adjustPartial,
  difference16,
  difference32,
  fold,
  pseudoHeaderSum,
  storeFull,
  sum,
  sumPayload,
} from '../../lib/wire/checksum.js';

/** The definition, slowly and exactly. */
function slowFold(bytes: Uint8Array): number {
  let total = 0n;
  for (let i = 0; i < bytes.length; i++) total += BigInt(bytes[i]!) << (i % 2 === 0 ? 8n : 0n);
  while (total > 0xffffn) total = (total & 0xffffn) + (total >> 16n);
  return Number(total);
}

const word = fc.oneof(
  fc.integer({ min: -0x80000000, max: 0xffffffff }),
  fc.constantFrom(0, -1, 0xffffffff, 0xffff, -65536),
);

t.test('sum and fold are RFC 1071, also of odd lengths and of the largest packet', async (t) => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 200 }), fc.nat(7), (bytes, shift) => {
      const shifted = new Uint8Array(shift + bytes.length + 3).fill(0xff);
      shifted.set(bytes, shift);
      const byWords = sumPayload(new DataView(shifted.buffer), shift, bytes.length);
      return fold(sum(shifted, shift, bytes.length)) === slowFold(bytes) && fold(byWords) === slowFold(bytes);
    }),
  );
  const largest = new Uint8Array(65535).fill(0xff);
  t.equal(fold(sum(largest, 0, 65535)), slowFold(largest));
  t.equal(fold(sumPayload(new DataView(largest.buffer), 0, 65535)), slowFold(largest));
  t.equal(
    fold(pseudoHeaderSum(-1, -1, 17, 65535) + sum(largest, 0, 65535)),
    slowFold(new Uint8Array([...new Uint8Array(8).fill(0xff), 0, 17, 0xff, 0xff, ...largest])),
  );
  // RFC 1071 section 3.
  t.equal(fold(sum(Uint8Array.of(0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7), 0, 8)), 0xddf2);
});

t.test('the pseudo-header sum is that of its twelve bytes, whatever the sign of the words', async () => {
  fc.assert(
    fc.property(word, word, fc.nat(255), fc.nat(65535), (src, dst, protocol, length) => {
      const bytes = new Uint8Array(12);
      const view = new DataView(bytes.buffer);
      view.setUint32(0, src);
      view.setUint32(4, dst);
      view.setUint16(8, protocol);
      view.setUint16(10, length);
      return fold(pseudoHeaderSum(src, dst, protocol, length)) === slowFold(bytes);
    }),
  );
});

t.test('RFC 1624 section 4: the example that equation 2 gets wrong', async (t) => {
  const bytes = Uint8Array.of(0xdd, 0x2f);
  adjustFull(bytes, 0, difference16(0x5555, 0x3285));
  t.same([...bytes], [0, 0]);
});

t.test(
  'a difference gives, bit for bit, what computing anew gives: full and partial, one word and several',
  async (t) => {
    // A first word that is not 0 keeps out the all-zero message, the one sum that is really 0.
    const message = fc.tuple(fc.integer({ min: 1, max: 255 }), fc.uint8Array({ minLength: 23, maxLength: 61 }));
    fc.assert(
      fc.property(message, word, word, fc.nat(0xffff), ([first, rest], a, b, c) => {
        const bytes = Uint8Array.from([first, ...rest]);
        const view = new DataView(bytes.buffer);
        view.setUint16(2, 0);
        storeFull(bytes, 2, sum(bytes, 0, bytes.length));
        let difference = difference32(view.getInt32(4), a) + difference32(view.getInt32(8), b);
        difference += difference16(view.getUint16(12), c);
        view.setInt32(4, a);
        view.setInt32(8, b);
        view.setUint16(12, c);
        adjustFull(bytes, 2, difference);
        const byDifference = view.getUint16(2);
        view.setUint16(2, 0);
        storeFull(bytes, 2, sum(bytes, 0, bytes.length));
        return byDifference === view.getUint16(2);
      }),
      { numRuns: 2000 },
    );
    fc.assert(
      fc.property(
        word,
        word,
        word,
        word,
        fc.integer({ min: 1, max: 255 }),
        fc.nat(65535),
        (a, b, c, d, protocol, length) => {
          const bytes = new Uint8Array(2);
          const view = new DataView(bytes.buffer);
          view.setUint16(0, fold(pseudoHeaderSum(a, b, protocol, length)));
          adjustPartial(bytes, 0, difference32(a, c) + difference32(b, d));
          return view.getUint16(0) === fold(pseudoHeaderSum(c, d, protocol, length));
        },
      ),
      { numRuns: 2000 },
    );
    t.pass();
  },
);

t.test('what verifies still verifies, what does not still does not', async () => {
  fc.assert(
    fc.property(fc.uint8Array({ minLength: 12, maxLength: 40 }), fc.boolean(), word, (random, isRight, to) => {
      const bytes = Uint8Array.from(random);
      const view = new DataView(bytes.buffer);
      if (isRight) {
        view.setUint16(0, 0);
        storeFull(bytes, 0, sum(bytes, 0, bytes.length));
      }
      const before = fold(sum(bytes, 0, bytes.length)) % 0xffff;
      adjustFull(bytes, 0, difference32(view.getInt32(4), to));
      view.setInt32(4, to);
      return fold(sum(bytes, 0, bytes.length)) % 0xffff === before;
    }),
  );
});
