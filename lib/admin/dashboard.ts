import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { extname } from 'node:path';
import { gzipSync } from 'node:zlib';
import type { Context } from 'hono';

/**
 * The dashboard's files, as web/build.mjs put them together. They are read and compressed when they are first asked for, and kept. A
 * browser asks each time whether its copy is still right, so that an update of weir is seen at once and nothing is sent twice.
 */
const FOLDER = new URL('../../dist/web/', import.meta.url);

const TYPES: Readonly<Record<string, string>> = {
  '.html': 'text/html; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.svg': 'image/svg+xml',
};

/** Nothing from elsewhere, nothing inline, nothing that frames it. */
const SECURITY: Readonly<Record<string, string>> = {
  'content-security-policy':
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  'x-content-type-options': 'nosniff',
  'referrer-policy': 'no-referrer',
  'cross-origin-resource-policy': 'same-origin',
};

interface Asset {
  readonly type: string;
  readonly plain: Uint8Array<ArrayBuffer>;
  readonly gzipped: Uint8Array<ArrayBuffer>;
  readonly hash: string;
}

const assets = new Map<string, Asset>();

/** The names of all files; none where the front end was not built. */
export function dashboardFiles(): readonly string[] {
  try {
    return readdirSync(FOLDER).filter((name) => extname(name) in TYPES);
  } catch {
    return [];
  }
}

/** @param name one of dashboardFiles() */
export function answerFile(context: Context, name: string): Response {
  const { type, plain, gzipped, hash } = load(name);
  const isGzipped = /\bgzip\b/.test(context.req.header('accept-encoding') ?? '');
  const etag = `"${hash}${isGzipped ? '-gz' : ''}"`;
  const headers = { ...SECURITY, etag, 'cache-control': 'no-cache', vary: 'accept-encoding' };
  if (context.req.header('if-none-match')?.includes(etag)) return context.body(null, 304, headers);
  const encoding = isGzipped ? { 'content-encoding': 'gzip' } : {};
  return context.body(isGzipped ? gzipped : plain, 200, { ...headers, ...encoding, 'content-type': type });
}

function load(name: string): Asset {
  const known = assets.get(name);
  if (known !== undefined) return known;
  const plain = readFileSync(new URL(name, FOLDER));
  const hash = createHash('sha256').update(plain).digest('base64url').slice(0, 22);
  const asset = { type: TYPES[extname(name)]!, plain, gzipped: gzipSync(plain, { level: 9 }), hash };
  assets.set(name, asset);
  return asset;
}
