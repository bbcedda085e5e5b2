import { chmodSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Browser, chromium, type Page } from 'playwright-core';

const CHROMIUM = '/usr/bin/chromium';

const ARGUMENTS = [
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
];

/**
 * Debian's Chromium, with a profile of its own that goes with it.
 *
 * @param inside a network namespace to run in, and a folder for the program that enters it
 */
export function openBrowser(inside?: { readonly namespace: string; readonly dir: string }): Promise<Browser> {
  const executablePath = inside === undefined ? CHROMIUM : entering(inside);
  return chromium.launch({ executablePath, args: ARGUMENTS, headless: true });
}

function entering({ namespace, dir }: { readonly namespace: string; readonly dir: string }): string {
  const path = join(dir, 'chromium');
  writeFileSync(path, `#!/bin/sh\nexec ip netns exec ${namespace} ${CHROMIUM} "$@"\n`);
  chmodSync(path, 0o755);
  return path;
}

/** What went over the network for a page, and what went wrong in it. */
export interface Observed {
  /** Bytes of answers, as they were transferred; of a stream that goes on, none. */
  transferred: number;
  readonly hosts: Set<string>;
  readonly errors: string[];
}

/** Watches a page from before it is opened. */
export function observe(page: Page): Observed {
  const observed: Observed = { transferred: 0, hosts: new Set(), errors: [] };
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) observed.errors.push(message.text());
  });
  page.on('pageerror', (error) => observed.errors.push(String(error)));
  page.on('request', (request) => observed.hosts.add(new URL(request.url()).host));
  page.on('requestfailed', (request) => observed.errors.push(`${request.url()}: ${request.failure()?.errorText}`));
  page.on('response', (response) => {
    if (response.status() >= 400) observed.errors.push(`${response.url()}: ${response.status()}`);
  });
  page.on('requestfinished', async (request) => {
    const { responseBodySize, responseHeadersSize } = await request.sizes();
    observed.transferred += responseBodySize + responseHeadersSize;
  });
  return observed;
}
