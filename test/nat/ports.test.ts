import t from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { type AllocatedPort, allocatePort } from '../../lib/nat/ports.js';
import { formatIpv4, parseIpv4 } from '../../lib/wire/address.js';

t.test('the snat allocator', async (t) => {
  const pool = {
    addresses: Int32Array.of(parseIpv4('10.96.255.1'), parseIpv4('10.96.255.2')),
    firstPort: 32768,
    lastPort: 65535,
  };
  const into: AllocatedPort = { address: 0, port: 0 };
  const taken = new Set<string>();
  let probes = 0;
  const probe = {
    isPortFree(address: number, port: number) {
      probes++;
      return !taken.has(`${formatIpv4(address)}:${port}`);
    },
  };
  const allocate = (clientPort: number, hash: number, draw: () => number) => {
    probes = 0;
    return allocatePort(pool, clientPort, hash, draw, probe, into)
      ? `${formatIpv4(into.address)}:${into.port}`
      : 'none';
  };

  t.equal(
    allocate(40000, 0, () => 0),
    '10.96.255.1:40000',
    'the port of the client, if free',
  );
  t.equal(
    allocate(40000, 1, () => 0),
    '10.96.255.2:40000',
    'the hash of the client picks the address',
  );
  t.equal(
    allocate(40000, -1, () => 0),
    '10.96.255.2:40000',
    'a hash is unsigned, however it is stored',
  );
  t.equal(
    allocate(1234, 0, () => 0),
    '10.96.255.1:32768',
    'a port outside the pool is never kept',
  );
  taken.add('10.96.255.1:40000');
  t.equal(
    allocate(40000, 0, () => 0xffffffff),
    '10.96.255.1:65535',
    'taken: a random try',
  );
  taken.add('10.96.255.1:65535');
  t.equal(
    allocate(40000, 0, () => 0xffffffff),
    '10.96.255.1:32768',
    'then upwards, around the end',
  );
  t.equal(probes, 3);

  for (let port = 32768; port < 32768 + 33; port++) taken.add(`10.96.255.1:${port}`);
  t.equal(
    allocate(32768, 0, () => 0),
    '10.96.255.2:32768',
    'after 1 + 1 + 32 tries the next address',
  );
  t.equal(probes, 1 + 33 + 1);
  for (let port = 32768; port < 65536; port++) for (const host of [1, 2]) taken.add(`10.96.255.${host}:${port}`);
  t.equal(
    allocate(40000, 0, () => 0),
    'none',
  );
  t.equal(probes, 2 * 34, 'bounded, also when nothing is free');

  taken.clear();
  const random = seededRandom(3);
  for (let i = 0; i < 20_000; i++) {
    const got = allocate(40000, i, random);
    if (got === 'none' || taken.has(got)) return t.fail(`${got} was given twice`);
    taken.add(got);
  }
  t.equal(taken.size, 20_000, 'no port twice');
});

t.test('a pool that is 99 % used: bounded, and what is found is free', async (t) => {
  const pool = {
    addresses: Int32Array.of(parseIpv4('10.96.255.1'), parseIpv4('10.96.255.2')),
    firstPort: 32768,
    lastPort: 65535,
  };
  const random = seededRandom(9);
  const taken = new Uint8Array(2 * 65536);
  const place = (address: number, port: number): number => (address & 1) * 65536 + port;
  for (const address of pool.addresses) {
    for (let port = pool.firstPort; port <= pool.lastPort; port++) {
      taken[place(address, port)] = random() % 100 === 0 ? 0 : 1;
    }
  }
  let probes = 0;
  const probe = {
    isPortFree(address: number, port: number) {
      probes++;
      return taken[place(address, port)] === 0;
    },
  };
  const into: AllocatedPort = { address: 0, port: 0 };
  let most = 0;
  let found = 0;
  for (let i = 0; i < 20_000; i++) {
    probes = 0;
    if (allocatePort(pool, 32768 + i, i, random, probe, into)) {
      found++;
      if (taken[place(into.address, into.port)] !== 0) t.fail(`${into.port} was taken`);
    }
    most = Math.max(most, probes);
  }
  t.equal(most, 2 * 34, 'one for the client’s port and 33 for each address, at most');
  // Of two runs of 33 ports, one in a hundred of which is free, half have one.
  t.ok(found > 8000 && found < 12_000, `${found} of 20,000`);
});
