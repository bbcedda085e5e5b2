import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Page } from 'playwright-core';
import t, { type Test } from 'tap';
import { backendAddress, ECHO_PORT, HTTP_PORT, type Lab, VIP } from '../../lib/lab/topology.js';
import { observe, openBrowser } from '../support/browser.js';
import { createGatewayLab } from '../support/gateway-lab.js';
import { Load } from '../support/load.js';
import { needsRoot } from '../support/skip.js';

const MAX_PAGE_BYTES = 200_000;
const PAGE = 'http://127.0.0.1:9650/';

/** Where the pictures of docs/dashboard.md go, when they are to be taken anew. */
const PICTURES = process.env.WEIR_PICTURES;

t.setTimeout(900_000);

function config(lab: Lab): string {
  const list = (port: number): string[] =>
    lab.backends.map((_, i) => `{ name: b${i + 1}, address: ${backendAddress(i + 1)}, port: ${port} }`);
  const gone = '{ name: gone, address: 10.2.0.13, port: 9 }';
  const health = 'health: { type: tcp, interval: 500ms, timeout: 200ms, rise: 1, fall: 1 }';
  const service = (head: string, backends: readonly string[]): string =>
    `  - { ${head}, address: ${VIP}, backends: [${backends.join(', ')}] }`;
  return [
    'admin: { listen: 127.0.0.1:9650 }',
    'snat: { addresses: [10.96.255.1] }',
    'services:',
    service(`name: web, port: 80, protocol: tcp, ${health}`, [...list(HTTP_PORT), gone]),
    service('name: api, port: 81, protocol: tcp, algorithm: random, mode: snat', list(HTTP_PORT)),
    service('name: echo, port: 7, protocol: udp', list(ECHO_PORT)),
    '',
  ].join('\n');
}

/** The text of a figure, once it is as wanted. A page under this policy evaluates nothing: it is looked at from here. */
async function figure(page: Page, selector: string, isWanted: (text: string) => boolean): Promise<string> {
  for (let tries = 0; tries < 300; tries++) {
    const text = (await page.locator(selector).textContent()) ?? '';
    if (isWanted(text)) return text;
    await sleep(100);
  }
  throw new Error(`${selector} never was as wanted`);
}

/** Waits for a figure that is not what it was: the page has a view of later. */
async function changes(page: Page, selector: string): Promise<string> {
  const before = await page.locator(selector).textContent();
  return figure(page, selector, (text) => text !== before);
}

function row(page: Page, name: string) {
  return page.locator('table.services tr', { has: page.getByText(name, { exact: true }) });
}

const root = needsRoot(t, 'ip', 'curl', 'chromium');

t.test('the dashboard over real traffic', { ...root, timeout: 800_000 }, async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  let weir = await lab.startWeir(config(lab));
  const browser = await openBrowser({ namespace: lab.namespace('gw'), dir: lab.dir });
  t.teardown(() => browser.close());
  const page = await browser.newPage({ viewport: { width: 1360, height: 1000 } });
  page.setDefaultTimeout(30_000);
  const seen = observe(page);

  await t.test('it opens, small and from here alone, and says what there is not', async (t) => {
    await page.goto(PAGE);
    await page.locator('#link[data-state=live]').waitFor();
    await page.getByText('There are no connections yet.').waitFor();
    await page.getByText('No client has a connection.').waitFor();
    t.equal(await page.locator('.empty.over:visible').count(), 3, 'no chart has a line');
    const paintMs = await page.evaluate(`performance.getEntriesByType('paint')[0].startTime`);
    t.comment(`first paint after ${Math.round(Number(paintMs))} ms, ${seen.transferred} bytes`);
    t.ok(seen.transferred > 10_000 && seen.transferred < MAX_PAGE_BYTES, `${seen.transferred} bytes`);
    t.strictSame([...seen.hosts], ['127.0.0.1:9650']);
    t.equal(await page.title(), 'weir');
  });

  const loads = [
    new Load(lab, `${VIP}:80`, '--parallel', '2', '--kept', '8'),
    new Load(lab, `${VIP}:81`, '--parallel', '1'),
    ...(PICTURES === undefined ? [] : [new Load(lab, `${VIP}:7`, '--udp')]),
  ];

  await t.test('figures move with the traffic', async (t) => {
    for (const measure of ['packets', 'bits', 'connections']) {
      const value = `[data-measure=${measure}] .value`;
      const first = await figure(page, value, (text) => /[1-9]/.test(text));
      t.ok(await figure(page, value, (text) => text !== first && /[1-9]/.test(text)), measure);
    }
    t.equal(await page.locator('.empty.over:visible').count(), 0);
    for (const name of ['b1', 'b2', 'b3']) {
      t.match(await row(page, name).first().locator('[data-label=State]').textContent(), /active/, name);
      t.match(await row(page, name).first().locator('[data-label=Share]').textContent(), /33\.\d %/, name);
    }
    await row(page, 'gone').getByText('down').waitFor();
    t.match(await row(page, 'gone').locator('[data-label=Share]').textContent(), /^0 %$/, 'it gets nothing');
    await page.locator('#clients-table').getByText('10.1.0.2').waitFor();
    await page.locator('#tables').getByText('ESTABLISHED').waitFor();
  });

  await t.test('a drain shows, and a reason', async () => {
    await weir.command(['drain', 'api', 'b2']);
    await row(page, 'b2').nth(1).getByText('by command').waitFor();
    await lab.exec('client', 'curl', ['-s', '-m', '2', `http://${VIP}:99/`]);
    await page.locator('#reasons-table').getByText('rst-unknown-port').waitFor();
  });

  await t.test('connections, filtered', async (t) => {
    await page.locator('#filter [name=service]').selectOption('web');
    await page.locator('#filter [name=state]').selectOption('ESTABLISHED');
    await page.locator('#filter').getByRole('button', { name: 'Show' }).click();
    await page
      .locator('#connections-note')
      .getByText(/^\d+ connections?\.$/)
      .waitFor();
    const rows = await page.locator('#connections-table tbody tr').allTextContents();
    t.ok(rows.length >= 8);
    t.ok(rows.every((text) => text.includes('10.96.0.10:80web') && text.includes('ESTABLISHED')));
    await page.locator('#filter [name=client]').fill('nonsense');
    await page.keyboard.press('Enter');
    await page.locator('#connections-note.error').getByText('"nonsense" is no address').waitFor();
    await page.locator('#filter [name=client]').fill('192.0.2.0/24');
    await page.keyboard.press('Enter');
    await page.getByText('No connection meets the filter.').waitFor();
    await page.getByRole('button', { name: 'Clear' }).click();
    await page.locator('#connections-table tbody tr').first().waitFor();
    await page.locator('#clients-table').getByRole('button', { name: '10.1.0.2' }).click();
    t.equal(await page.locator('#filter [name=client]').inputValue(), '10.1.0.2');
  });

  await t.test('a packet, explained', async (t) => {
    await page.locator('#question [name=src]').fill('10.1.0.2:40000');
    await page.locator('#question [name=dst]').fill(`${VIP}:80`);
    await page.locator('#question').getByRole('button', { name: 'Explain' }).click();
    const outcome = page.locator('#answer .outcome');
    await outcome.waitFor();
    t.match(await outcome.textContent(), /forward.*web → b[123]/);
    t.match(await page.locator('#answer .trace').first().textContent(), /destination.*service/);
    await page.locator('#question [name=src]').fill('10.1.0.2');
    await page.keyboard.press('Enter');
    await page.locator('#answer .error').getByText('"10.1.0.2" is no ADDRESS:PORT').waitFor();
    await page
      .locator('#connections-table')
      .getByRole('button', { name: /^Explain/ })
      .first()
      .click();
    await page.locator('#answer').getByText('conntrack').first().waitFor();
  });

  await t.test('the backends of one service in the charts', async (t) => {
    await page.locator('table.services').getByRole('button', { name: 'web', exact: true }).click();
    t.match(await page.locator('#scope option:checked').textContent(), 'backends of web');
    await page.locator('[data-measure=packets] .detail').getByText('from clients').waitFor();
    await page.locator('#scope').selectOption('');
  });

  await t.test('pictures', { skip: PICTURES === undefined && 'with WEIR_PICTURES=docs/images' }, async () => {
    await sleep(90_000);
    await page.locator('#filter').getByRole('button', { name: 'Clear' }).click();
    for (const theme of ['light', 'dark'] as const) {
      await page.emulateMedia({ colorScheme: theme, reducedMotion: 'reduce' });
      await page.evaluate('scrollTo(0, 0)');
      await changes(page, '[data-measure=packets] .value');
      await page.screenshot({ path: join(PICTURES!, `dashboard-${theme}.png`) });
    }
    await page.evaluate(`document.querySelector('#conntrack').scrollIntoView()`);
    await page.screenshot({ path: join(PICTURES!, 'dashboard-tables.png') });
    await page.setViewportSize({ width: 390, height: 844 });
    await page.evaluate('scrollTo(0, 0)');
    await changes(page, '[data-measure=packets] .value');
    await page.screenshot({ path: join(PICTURES!, 'dashboard-phone.png') });
    await page.setViewportSize({ width: 1360, height: 1000 });
  });

  // A browser tells of each refusal by itself: of the filter that means nothing, and of the packet.
  const unexpected = seen.errors.filter((error) => !/\b400\b/.test(error));
  t.strictSame(unexpected, [], 'nothing else failed, and the console is silent');

  await t.test('weir goes and comes back', async (t: Test) => {
    t.equal(await weir.stop(), 0);
    await page.locator('#link[data-state=lost]').waitFor();
    weir = await lab.startWeir(config(lab));
    await page.locator('#link[data-state=live]').waitFor();
    await changes(page, '[data-measure=packets] .value');
    t.match(await page.locator('#who').textContent(), /up \d+ s/);
  });

  for (const load of loads) load.stop();
  await Promise.all(loads.map(({ ended }) => ended));
  await browser.close();
  t.equal(await weir.stop(), 0);
});
