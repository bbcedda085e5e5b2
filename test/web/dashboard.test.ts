import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import axe from 'axe-core';
import type { Browser, Page } from 'playwright-core';
import t, { type Test } from 'tap';
import { createApp } from '../../lib/admin/app.js';
import { serveAdmin } from '../../lib/admin/serve.js';
import { STATE_NAMES } from '../../lib/conntrack/record.js';
import type { LiveView } from '../../lib/control/live/live-view.js';
import { observe, openBrowser } from '../support/browser.js';
import { backend, FakeWeir, liveView } from '../support/fake-weir.js';
import { needsTools } from '../support/skip.js';

const HOSTILE = '<img/src=x/onerror=alert(1)><script>alert(2)</script>"\'&amp;';

t.setTimeout(900_000);

async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
}

/** A page of the dashboard of a weir that says these views. */
async function open(
  t: Test,
  browser: Browser,
  views: readonly LiveView[],
): Promise<{ page: Page; weir: FakeWeir; url: string }> {
  const folder = mkdtempSync(join(tmpdir(), 'weir-page-'));
  const weir = new FakeWeir();
  weir.liveViews = views;
  const port = await freePort();
  const listen = { host: '127.0.0.1', port };
  const admin = await serveAdmin(weir, { socket: join(folder, 'weir.sock'), listen, dashboard: true });
  const page = await browser.newPage();
  page.setDefaultTimeout(20_000);
  t.teardown(async () => {
    await page.close();
    await admin.close();
    rmSync(folder, { recursive: true });
  });
  return { page, weir, url: `http://127.0.0.1:${port}/` };
}

/** Traffic, with every state a backend can have, and all names hostile. */
function hostileView(at: string, intervalSeconds: number): LiveView {
  const view = liveView();
  const [service] = view.services;
  const states = [
    backend(HOSTILE),
    {
      ...backend('b2'),
      port: 1,
      state: 'down' as const,
      takesNew: false,
      health: { state: 'down' as const, seconds: 3, reason: HOSTILE, last: HOSTILE },
    },
    { ...backend('b3'), port: 2, state: 'draining' as const, drainedBy: 'command' as const },
  ];
  const backends = states.map((each) => ({ ...each, rates: service!.rates, share: 1 / 3 }));
  return {
    ...view,
    at,
    intervalSeconds,
    services: [
      { ...service!, name: HOSTILE, backends },
      { ...service!, port: 81, backends: [] },
    ],
  };
}

const VIEWS = [
  hostileView('2026-01-02T03:04:05.000Z', 0),
  hostileView('2026-01-02T03:04:06.000Z', 1),
  hostileView('2026-01-02T03:04:07.000Z', 1),
];

const FLOW = {
  proto: 'tcp',
  type: 'OUT',
  client: '10.1.0.2:40000',
  vip: '10.96.0.10:80',
  backend: '10.2.0.11:8080',
  service: HOSTILE,
  state: 'ESTABLISHED',
  flags: ['SeenNonSyn'],
  expiresIn: 7999.5,
  packets: { original: 3, reply: 2 },
  bytes: { original: 300, reply: 200 },
};

interface Violation {
  readonly id: string;
  readonly nodes: readonly { readonly html: string; readonly failureSummary: string }[];
}

/** What axe finds wrong with the page, all rules of WCAG 2.2 AA and good practice. */
async function violations(page: Page): Promise<string[]> {
  const found = (await page.evaluate('axe.run()')) as { violations: Violation[] };
  return found.violations.flatMap(({ id, nodes }) =>
    nodes.map(({ html, failureSummary }) => `${id}: ${html}: ${failureSummary}`),
  );
}

t.test('the page', needsTools(t, 'chromium'), async (t) => {
  const browser = await openBrowser();
  t.teardown(() => browser.close());

  await t.test('what others have named is text', async (t) => {
    const { page, weir, url } = await open(t, browser, VIEWS);
    weir.chunks = () => [JSON.stringify([FLOW])];
    weir.explainAnswer = {
      ...weir.explainAnswer,
      steps: [{ step: 'parse', result: HOSTILE, text: HOSTILE, notes: [HOSTILE], details: {} }],
    };
    const seen = observe(page);
    page.on('dialog', (dialog) => t.fail(`a dialog: ${dialog.message()}`));
    await page.goto(url);
    await page.locator('#question [name=src]').fill('10.1.0.2:1');
    await page.locator('#question [name=dst]').fill('10.96.0.10:80');
    await page.keyboard.press('Enter');
    for (const place of [
      'table.services button',
      'table.services tr.backend th',
      '#filter option',
      '#scope option',
      '#connections-table td',
      '#answer .result',
    ]) {
      await page.locator(place, { hasText: HOSTILE }).first().waitFor({ state: 'attached' });
    }
    t.equal(await page.locator('main img, main script').count(), 0);
    t.strictSame(seen.errors, []);
  });

  await t.test('nothing stands in the way of anybody', async (t) => {
    const { page, weir, url } = await open(t, browser, VIEWS);
    weir.chunks = () => [JSON.stringify([{ ...FLOW, service: 'web' }])];
    await page.addInitScript(axe.source);
    await page.goto(url);
    await page.locator('#connections-table tbody tr').waitFor();
    await page.locator('#question [name=src]').fill('10.1.0.2:1');
    await page.locator('#question [name=dst]').fill('10.96.0.10:80');
    await page.keyboard.press('Enter');
    await page.locator('#answer .trace').waitFor();
    for (const colorScheme of ['light', 'dark'] as const) {
      for (const width of [1360, 390]) {
        await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' });
        await page.setViewportSize({ width, height: 900 });
        t.strictSame(await violations(page), [], `${colorScheme}, ${width} px`);
        const overflow = await page.evaluate(
          'document.documentElement.scrollWidth - document.documentElement.clientWidth',
        );
        t.equal(overflow, 0, 'the page is no wider than the screen');
      }
    }
  });

  await t.test('the keyboard reaches every control, in the order of the page', async (t) => {
    const { page, weir, url } = await open(t, browser, VIEWS);
    weir.chunks = () => [JSON.stringify([{ ...FLOW, service: 'web' }])];
    await page.goto(url);
    await page.locator('#connections-table tbody tr').waitFor();
    const wanted = (await page.evaluate(
      `[...document.querySelectorAll('a, button, select, input, [tabindex="0"]')].filter((each) => !each.disabled && each.checkVisibility()).length`,
    )) as number;
    const reached = new Set<number>();
    let last = -1;
    for (let i = 0; i < wanted; i++) {
      await page.keyboard.press('Tab');
      const at = (await page.evaluate(`[...document.querySelectorAll('*')].indexOf(document.activeElement)`)) as number;
      t.ok(at > last, 'further down');
      const outline = await page.evaluate('getComputedStyle(document.activeElement).outlineStyle');
      t.not(outline, 'none', 'it is seen where the focus is');
      last = at;
      reached.add(at);
    }
    t.equal(reached.size, wanted);
    t.ok(wanted > 20);
    await page.locator('.skip').focus();
    await page.keyboard.press('Enter');
    t.equal(await page.evaluate('document.activeElement.id'), 'main');
  });

  await t.test('themes: as the system has it, or as chosen, also after a reload', async (t) => {
    const { page, url } = await open(t, browser, VIEWS);
    await page.emulateMedia({ colorScheme: 'dark' });
    await page.goto(url);
    const ground = (): Promise<unknown> => page.evaluate('getComputedStyle(document.body).backgroundColor');
    const dark = await ground();
    const button = page.locator('#theme');
    t.equal(await button.textContent(), 'Theme: system');
    await button.click();
    t.equal(await button.textContent(), 'Theme: light');
    const light = await ground();
    t.not(light, dark);
    await page.reload();
    t.equal(await ground(), light);
    t.equal(await button.textContent(), 'Theme: light');
    await button.click();
    t.equal(await ground(), dark);
    await button.click();
    await page.emulateMedia({ colorScheme: 'light' });
    t.equal(await ground(), light, 'the system again');
  });

  await t.test('states of connections that can be chosen are those there are', async (t) => {
    const { page, url } = await open(t, browser, []);
    await page.goto(url);
    t.strictSame((await page.locator('#filter [name=state] option').allTextContents()).slice(1), STATE_NAMES.slice(1));
  });
});

t.test('its files', async (t) => {
  const app = createApp(new FakeWeir(), 'dashboard');
  const ask = (path: string, headers: Record<string, string> = {}): Response | Promise<Response> =>
    app.request(path, { headers: { host: '127.0.0.1:9650', ...headers } });
  const page = await ask('/');
  t.equal(page.status, 200);
  const policy = page.headers.get('content-security-policy')!;
  t.match(policy, "default-src 'none'; script-src 'self'");
  t.notMatch(policy, /unsafe|\*|data:/);
  const text = await page.text();
  t.notMatch(text, /<script(?![^>]*src=)|<style|\son\w+=|style=|https?:/, 'nothing inline, nothing from elsewhere');
  for (const [, name] of text.matchAll(/(?:src|href)="([^"#]+)"/g)) t.equal((await ask(`/${name}`)).status, 200, name);
  const zipped = await ask('/uplot.js', { 'accept-encoding': 'gzip' });
  t.match(
    zipped.headers,
    new Map([
      ['content-encoding', 'gzip'],
      ['cache-control', 'no-cache'],
      ['vary', 'accept-encoding'],
    ]),
  );
  t.ok((await zipped.arrayBuffer()).byteLength < 30_000);
  const etag = zipped.headers.get('etag')!;
  const again = await ask('/uplot.js', { 'accept-encoding': 'gzip', 'if-none-match': etag });
  t.strictSame([again.status, await again.text()], [304, '']);
  const plain = await ask('/uplot.js');
  t.not(plain.headers.get('etag'), etag, 'another form is another thing');
  t.equal((await ask('/nothing.js')).status, 404);
  t.equal((await createApp(new FakeWeir(), 'public').request('/')).status, 404, '`dashboard: false`');
});
