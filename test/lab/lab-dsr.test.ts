import { execFileSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import t from 'tap';
import {
  backendAddress,
  CLIENT_ADDRESS,
  gatewayAddress,
  HTTP_PORT,
  Lab,
  SERVICE_NET,
  takeDown,
  VIP,
} from '../../lib/lab/topology.js';
import { needsRoot } from '../support/skip.js';

/*
 *   client -- router ==+== gw, gw2        a lab of shape one-arm: answers do not come past the gateways
 *                      +== b1, b2, b3
 */

const PREFIX = `weir-d${process.pid}`;

function namespaces(): string[] {
  const names = execFileSync('ip', ['netns', 'list'], { encoding: 'utf8' }).split('\n');
  return names.map((line) => line.split(' ')[0]!).filter((name) => name.startsWith(`${PREFIX}-`));
}

t.teardown(() => takeDown(PREFIX));

t.test('a lab with one arm', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await Lab.create({ prefix: PREFIX, shape: 'one-arm', gateways: 2, backends: 1 });
  t.teardown(() => lab.destroy());
  t.same(lab.gateways, ['gw', 'gw2']);
  t.same(namespaces().sort(), ['b1', 'client', 'gw', 'gw2', 'router'].map((role) => `${PREFIX}-${role}`).sort());
  await lab.startServers();
  const { stdout } = await lab.exec('client', 'curl', ['-s', `http://${backendAddress(1)}:${HTTP_PORT}/`]);
  t.match(stdout, `{"backend":"b1","client":"${CLIENT_ADDRESS}","port":`, 'the client reaches backends past gateways');

  const nextHops = async (): Promise<string[]> => {
    const ports = Array.from({ length: 64 }, (_, i) => 40_000 + i);
    const way = `${VIP} from ${CLIENT_ADDRESS} iif client ipproto tcp dport 80`;
    const ask = ports.map((port) => `ip route get ${way} sport ${port}`).join('; ');
    const { stdout } = await lab.exec('router', 'sh', ['-c', ask]);
    return [...new Set([...stdout.matchAll(/ via (\S+)/g)].map(([, address]) => address!))].sort();
  };
  t.same(await nextHops(), [gatewayAddress(1), gatewayAddress(2)], 'ports decide on the gateway');
  await lab.routeToGateways(['gw2']);
  t.same(await nextHops(), [gatewayAddress(2)]);
  t.match((await lab.exec('router', 'ip', ['route'])).stdout, `${SERVICE_NET} via ${gatewayAddress(2)}`);

  await lab.destroy();
  t.same(namespaces(), []);
  t.notOk(existsSync(lab.dir));
});

t.test('a shape has room for so many', async (t) => {
  await t.rejects(Lab.create({ prefix: PREFIX, gateways: 2 }), {
    code: 'USAGE',
    message: /inline has 1 to 1 gateways/,
  });
  await t.rejects(Lab.create({ prefix: PREFIX, shape: 'one-arm', gateways: 10 }), { code: 'USAGE' });
  await t.rejects(Lab.create({ prefix: PREFIX, backends: 201 }), { code: 'USAGE' });
});
