import { Document, isCollection, isMap, type ParsedNode, parseDocument, type YAMLMap, YAMLSeq } from 'yaml';
import { WeirError } from '../base/errors.js';
import { formatProblem, parseConfig } from '../config/load.js';
import type { DraftBackend, DraftService } from './draft.js';

/** Longer lists of backends' fields go over several lines. */
const LINE_WIDTH = 140;

const MARKER = '# Services by `weir import';

/**
 * A whole configuration: the base's text as it stands, without its services, and these instead. The same input gives the same text.
 *
 * @param base a valid configuration's text; empty: nothing but services
 * @param source `kubernetes`: which import it was
 * @throws WeirError IMPORT_INVALID when the base refers to what was in its services
 */
export function configText(services: readonly DraftService[], base: string, source: string): string {
  const head = withoutServices(base);
  const marker = `${MARKER} ${source}\`: the next one replaces them.`;
  const text = `${head}${head === '' ? '' : '\n'}${marker}\n${servicesText(services)}`;
  const { problems } = parseConfig(text);
  if (problems.length > 0) {
    const lines = problems.map((problem) => formatProblem('(what would be written)', problem));
    throw new WeirError('IMPORT_INVALID', lines.join('\n'));
  }
  return text;
}

function servicesText(services: readonly DraftService[]): string {
  if (services.length === 0) return 'services: []\n';
  const document = new Document({});
  const list = new YAMLSeq();
  for (const service of services) {
    const node = document.createNode(written(service)) as YAMLMap;
    node.commentBefore = ` ${service.comment.replace(/[^\x20-\x7e]/g, '?')}`;
    list.add(node);
    for (const { value } of node.items) {
      if (!isCollection(value)) continue;
      const isList = value instanceof YAMLSeq;
      if (!isList || value.items.length === 0 || !isMap(value.items[0])) value.flow = true;
      else for (const item of value.items) (item as YAMLMap).flow = true;
    }
  }
  document.set('services', list);
  return document.toString({ lineWidth: LINE_WIDTH });
}

/** Only what differs from the defaults, and the protocol. */
function written(service: DraftService): Record<string, unknown> {
  const { name, address, port, protocol, algorithm, mode, affinity, sourceRanges = [], backends } = service;
  return {
    name,
    address,
    port,
    protocol,
    ...(algorithm === undefined ? {} : { algorithm }),
    ...(mode === undefined ? {} : { mode }),
    ...(affinity === undefined ? {} : { affinity: { clientIp: affinity } }),
    ...(sourceRanges.length === 0 ? {} : { sourceRanges: [...sourceRanges] }),
    backends: backends.map(writtenBackend),
  };
}

function writtenBackend({ name, address, port, weight = 1, maxConnections }: DraftBackend): Record<string, unknown> {
  return {
    ...(name === undefined ? {} : { name }),
    address,
    port,
    ...(weight === 1 ? {} : { weight }),
    ...(maxConnections === undefined ? {} : { maxConnections }),
  };
}

/** A text that ends with a line's end, or nothing. */
function withoutServices(base: string): string {
  const unmarked = base.replace(new RegExp(`^${MARKER}.*\\n?`, 'gm'), '');
  const document = parseDocument(unmarked, { keepSourceTokens: false });
  const root = document.contents as ParsedNode | null;
  if (root === null || !isMap(root)) return '';
  if (root.flow) {
    document.delete('services');
    if ((root as YAMLMap).items.length === 0) return '';
    root.flow = false;
    return document.toString({ lineWidth: LINE_WIDTH });
  }
  const at = root.items.findIndex(({ key }) => String(key) === 'services');
  if (at < 0) return tidy(unmarked);
  const start = unmarked.lastIndexOf('\n', root.items[at]!.key.range![0]) + 1;
  const next = root.items[at + 1];
  const end = root.items[at]!.value?.range?.[1] ?? root.items[at]!.key.range![2];
  const rest = next === undefined ? '' : unmarked.slice(lineEnd(unmarked, end));
  // A comment that is indented is about the services still, another about the next key.
  return tidy(unmarked.slice(0, start) + rest.replace(/^(?:[ \t]+#.*\n|[ \t]*\n)*/, ''));
}

function lineEnd(text: string, at: number): number {
  // A block ends where the next line begins, a flow within its line.
  if (at > 0 && text[at - 1] === '\n') return at;
  const newline = text.indexOf('\n', at);
  return newline < 0 ? text.length : newline + 1;
}

function tidy(text: string): string {
  const trimmed = text.replace(/\s*\n(\.\.\.)?\s*$/, '').replace(/\s+$/, '');
  return trimmed === '' || trimmed === '---' ? '' : `${trimmed}\n`;
}
