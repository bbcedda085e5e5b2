import fc from 'fast-check';
import t from 'tap';
import { clampMss } from '../../lib/nat/mss.js';
import { partial, tcp, verifyChecksums } from '../fixtures/packets.js';

const SYN_ACK = { src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 40000, flags: 'SA', seq: 9, ack: 2 };

/** The options of a SYN-ACK, clamped to `limit`; fails on a wrong checksum, in both forms of it. */
function clamped(options: readonly number[], limit: number): number[] {
  const packet = tcp({ ...SYN_ACK, options: Uint8Array.from(options) });
  const view = new DataView(packet.buffer);
  const inPartialForm = partial(packet);
  clampMss(view, packet, 20, limit, false);
  const problems = verifyChecksums(packet);
  const { bytes, vnet } = inPartialForm;
  clampMss(new DataView(bytes.buffer), bytes, 20, limit, true);
  problems.push(...verifyChecksums(bytes, vnet));
  if (Buffer.compare(bytes.subarray(40), packet.subarray(40)) !== 0) problems.push('the forms differ');
  if (problems.length > 0) throw new Error(problems.join());
  return [...packet.subarray(40, 40 + options.length)];
}

t.test('the option, wherever it stands', async (t) => {
  const rows: [name: string, options: number[], expected: number[]][] = [
    ['first', [2, 4, 5, 180], [2, 4, 5, 94]],
    ['at an odd offset', [1, 2, 4, 5, 180, 1, 1, 1], [1, 2, 4, 5, 94, 1, 1, 1]],
    ['behind others', [4, 2, 3, 3, 7, 2, 4, 5, 180, 0, 0, 0], [4, 2, 3, 3, 7, 2, 4, 5, 94, 0, 0, 0]],
    ['lower already', [2, 4, 2, 24], [2, 4, 2, 24]],
    ['exactly that', [2, 4, 5, 94], [2, 4, 5, 94]],
    ['zero', [2, 4, 0, 0], [2, 4, 0, 0]],
    ['the largest', [2, 4, 255, 255], [2, 4, 5, 94]],
    ['twice', [2, 4, 5, 180, 2, 4, 5, 181], [2, 4, 5, 94, 2, 4, 5, 94]],
    ['none', [3, 3, 7, 1], [3, 3, 7, 1]],
    ['after the end of options', [0, 0, 0, 0, 2, 4, 5, 180], [0, 0, 0, 0, 2, 4, 5, 180]],
    ['of another length', [2, 3, 5, 180, 1, 1, 1, 1], [2, 3, 5, 180, 1, 1, 1, 1]],
    ['beyond the header', [1, 1, 2, 4], [1, 1, 2, 4]],
    ['a kind without a length', [1, 1, 1, 2], [1, 1, 1, 2]],
    ['a length of zero', [8, 0, 2, 4, 5, 180, 0, 0], [8, 0, 2, 4, 5, 180, 0, 0]],
    ['a length of one', [8, 1, 2, 4, 5, 180, 0, 0], [8, 1, 2, 4, 5, 180, 0, 0]],
  ];
  for (const [name, options, expected] of rows) t.same(clamped(options, 1374), expected, name);
});

t.test('the law: nothing grows, checksums hold, and nothing but MSS values changes', async (t) => {
  const options = fc.array(fc.oneof(fc.constantFrom(0, 1, 2, 3, 4), fc.integer({ min: 0, max: 255 })), {
    maxLength: 40,
  });
  fc.assert(
    fc.property(options, fc.integer({ min: 1, max: 65535 }), (bytes, limit) => {
      const after = clamped(bytes, limit);
      let changed = 0;
      for (let i = 0; i < bytes.length; i++) if (after[i] !== bytes[i]) changed++;
      const again = clamped(after, limit);
      return changed <= bytes.length / 2 && again.join() === after.join();
    }),
  );
  t.pass();
});
