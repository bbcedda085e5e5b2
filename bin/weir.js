#!/usr/bin/env node
import { existsSync } from 'node:fs';

const main = new URL('../dist/weir.js', import.meta.url);
if (!existsSync(main)) {
  console.error('weir: it is not built yet. Run "npm ci" (or "npm run build") in the checkout first.');
  process.exit(1);
}
const { main: run } = await import(main.href);
await run(process.argv);
