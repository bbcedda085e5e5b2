import {
  Composer,
  type CST,
  type Document,
  isAlias,
  isMap,
  isScalar,
  isSeq,
  LineCounter,
  type Node,
  type ParsedNode,
  Parser,
} from 'yaml';
import type { Fault } from './faults.js';

/**
 * A YAML text (JSON is YAML) as plain values, and where each of them stands. The tree is walked here instead of by the library's
 * toJS: this way a duplicate key has a path and does not hide the other mistakes, aliases are bounded, and a path can
 * be led back to a position through them.
 */

export interface Position {
  readonly line: number;
  readonly column: number;
}

/** What is not YAML, and where. */
export type SyntaxMistake = Position & { readonly message: string };

/** Deeper than any configuration; a file beyond is a mistake or an attack. */
const MAX_DEPTH = 32;
const TOO_DEEP = 'is nested too deeply';
/** Misplaced pieces of a text after which the rest of it is not looked at: by then it is something else than YAML. */
const MAX_MISPLACED = 1000;
/** Values that aliases may stand for in all: a bomb of nested aliases stops here. */
const MAX_ALIASED = 1_000_000;

/** A configuration's text: one document, or none. */
export class YamlSource {
  /** What the text says; `undefined` when it has mistakes of syntax. */
  readonly value: unknown;
  readonly syntaxErrors: readonly SyntaxMistake[];
  /** Mistakes the schema cannot see: duplicate keys, bad aliases. */
  readonly faults: readonly Fault[];

  readonly #lines = new LineCounter();
  readonly #document: YamlDocument | undefined;

  constructor(text: string) {
    const { parsed, syntaxErrors } = parse(text, this.#lines);
    const second = parsed[1];
    if (second !== undefined) {
      const at = positionOf(this.#lines, startOfDocument(text, second));
      syntaxErrors.push({ ...at, message: 'starts a second document; a configuration is one YAML document' });
    }
    this.syntaxErrors = syntaxErrors;
    if (syntaxErrors.length === 0 && parsed.length > 0)
      this.#document = new YamlDocument(parsed[0]!.contents, this.#lines);
    this.value = this.#document?.value;
    this.faults = this.#document?.faults ?? [];
  }

  /** Where the value at `path` stands, or its key, or the nearest parent that exists; or where the offset `at` is. */
  locate(path: readonly PropertyKey[], at?: Fault['at']): Position {
    return this.#document?.locate(path, at) ?? { line: 1, column: 1 };
  }
}

/** The documents of a text that may have any number of them, without those that are empty; none when it has mistakes of syntax. */
export function readDocuments(text: string): {
  readonly documents: readonly YamlDocument[];
  readonly syntaxErrors: readonly SyntaxMistake[];
} {
  const lines = new LineCounter();
  const { parsed, syntaxErrors } = parse(text, lines);
  if (syntaxErrors.length > 0) return { documents: [], syntaxErrors };
  const documents = parsed.map(({ contents }) => new YamlDocument(contents, lines));
  return { documents: documents.filter(({ value }) => value !== null), syntaxErrors };
}

export class YamlDocument {
  readonly value: unknown;
  readonly faults: readonly Fault[];

  readonly #lines: LineCounter;
  readonly #root: Node | null;
  readonly #targets = new Map<Node, Node>();

  constructor(root: Node | null, lines: LineCounter) {
    this.#lines = lines;
    this.#root = root;
    const reader = new Reader(this.#targets);
    this.value = reader.read(root, [], 0);
    this.faults = reader.faults;
  }

  /** As YamlSource's. */
  locate(path: readonly PropertyKey[], at?: Fault['at']): Position {
    if (typeof at === 'number') return positionOf(this.#lines, at);
    let node = this.#root;
    let offset = startOf(node) ?? 0;
    for (let depth = 0; depth < path.length; depth++) {
      const parent = node !== null && isAlias(node) ? (this.#targets.get(node) ?? null) : node;
      const isLast = depth === path.length - 1;
      if (isMap(parent)) {
        const pair = parent.items.find(({ key }) => keyText(key) === String(path[depth]));
        if (pair === undefined) break;
        node = (pair.value as Node | null) ?? null;
        const keyStart = startOf(pair.key as Node | null);
        offset = (at === 'key' && isLast ? keyStart : (startOf(node) ?? keyStart)) ?? offset;
      } else if (isSeq(parent)) {
        const item = parent.items[path[depth] as number] as Node | null | undefined;
        if (item === undefined) break;
        node = item;
        offset = startOf(node) ?? offset;
      } else break;
    }
    return positionOf(this.#lines, offset);
  }
}

function positionOf(lines: LineCounter, offset: number): Position {
  const { line, col } = lines.linePos(offset);
  return { line: Math.max(line, 1), column: Math.max(col, 1) };
}

/** Turns nodes into values, in the order of the text: an alias means the last anchor of its name before it. */
class Reader {
  readonly faults: Fault[] = [];
  readonly #targets: Map<Node, Node>;
  readonly #anchors = new Map<string, Node>();
  readonly #open = new Set<Node>();
  #aliased = 0;
  #aliasDepth = 0;
  #stopped = false;

  constructor(targets: Map<Node, Node>) {
    this.#targets = targets;
  }

  read(node: Node | null, path: readonly PropertyKey[], depth: number): unknown {
    if (node === null || this.#stopped) return null;
    if (depth > MAX_DEPTH) return this.#stop(path, TOO_DEEP);
    if (this.#aliasDepth > 0 && ++this.#aliased > MAX_ALIASED)
      return this.#stop(path, 'expands to too much: an alias of aliases');
    if (isAlias(node)) return this.#readAlias(node, node.source, path, depth);
    const { anchor } = node as { anchor?: string };
    if (anchor !== undefined && this.#aliasDepth === 0) this.#anchors.set(anchor, node);
    if (isScalar(node)) return node.value;
    this.#open.add(node);
    const value = isMap(node) ? this.#readMap(node, path, depth) : this.#readSeq(node, path, depth);
    this.#open.delete(node);
    return value;
  }

  #readAlias(node: Node, name: string, path: readonly PropertyKey[], depth: number): unknown {
    const target = this.#anchors.get(name);
    if (target === undefined) return this.#fault(path, `is an alias of \`&${name}\`, which is not defined before it`);
    if (this.#open.has(target)) return this.#fault(path, `is an alias of \`&${name}\`, which it is part of`);
    this.#targets.set(node, target);
    this.#aliasDepth++;
    const value = this.read(target, path, depth + 1);
    this.#aliasDepth--;
    return value;
  }

  #readMap(
    node: { items: readonly { key: unknown; value: unknown }[] },
    path: readonly PropertyKey[],
    depth: number,
  ): unknown {
    const value: Record<string, unknown> = {};
    for (const pair of node.items) {
      const key = keyText(pair.key);
      if (key === null) {
        this.#fault(path, 'has a key that is not plain text');
        continue;
      }
      const keyPath = [...path, key];
      if (Object.hasOwn(value, key)) {
        const at = startOf(pair.key as Node)!;
        this.faults.push({ path: keyPath, message: 'is given again; a key may be given once', at });
        continue;
      }
      const item = this.read(pair.value as Node | null, keyPath, depth + 1);
      // Assigning to __proto__ would set the prototype.
      Object.defineProperty(value, key, { value: item, enumerable: true, writable: true, configurable: true });
    }
    return value;
  }

  #readSeq(node: Node, path: readonly PropertyKey[], depth: number): unknown {
    const { items } = node as unknown as { items: readonly (Node | null)[] };
    return items.map((item, i) => this.read(item, [...path, i], depth + 1));
  }

  #fault(path: readonly PropertyKey[], message: string): undefined {
    this.faults.push({ path, message });
    return undefined;
  }

  #stop(path: readonly PropertyKey[], message: string): undefined {
    this.#stopped = true;
    return this.#fault(path, message);
  }
}

type Parsed = Document.Parsed<ParsedNode>;

/**
 * The parser recurses: brackets nested by the thousand end in a RangeError, which is the file's fault. Of each mistake it makes an Error;
 * where the text is none of YAML's, traces of the stack would take most of the time and memory.
 */
function parse(text: string, lines: LineCounter): { parsed: Parsed[]; syntaxErrors: SyntaxMistake[] } {
  let parsed: Parsed[];
  const { stackTraceLimit } = Error;
  try {
    Error.stackTraceLimit = 0;
    const composer = new Composer({ uniqueKeys: false, prettyErrors: false, logLevel: 'error' });
    parsed = [
      ...composer.compose(someTokens(new Parser(lines.addNewLine).parse(text)), false, text.length),
    ] as Parsed[];
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return { parsed: [], syntaxErrors: [{ line: 1, column: 1, message: TOO_DEEP }] };
  } finally {
    Error.stackTraceLimit = stackTraceLimit;
  }
  const found = parsed.flatMap(({ errors, warnings }) => [...errors, ...warnings]);
  const syntaxErrors = causesOf(text, found).map(({ pos, message }) => ({
    ...positionOf(lines, pos[0]),
    message: rewordSyntax(message),
  }));
  return { parsed, syntaxErrors };
}

type Complaint = Parsed['errors'][number] | Parsed['warnings'][number];

/** Of the parser's complaints, those about brackets and indentation. */
const STRUCTURE: readonly string[] = ['BAD_INDENT', 'MISSING_CHAR', 'BLOCK_AS_IMPLICIT_KEY', 'MULTILINE_IMPLICIT_KEY'];

/** A line that begins with a key: whatever went wrong before, here the text makes sense again. */
const TOP_LEVEL_KEY = /^[\w"'][^\n]*:(\s|$)/m;

/**
 * One mistake makes the parser complain again: at the same place, or about all that follows. A bracket that is not closed, or a line that
 * stands too far left or right, changes what the lines after it are, up to the next key at the left margin.
 */
function causesOf(text: string, found: readonly Complaint[]): Complaint[] {
  const causes: Complaint[] = [];
  let cause: Complaint | undefined;
  for (const [i, complaint] of found.entries()) {
    const { pos, code } = complaint;
    if (i > 0 && (code === 'UNEXPECTED_TOKEN' || pos[0] === found[i - 1]!.pos[0])) continue;
    if (STRUCTURE.includes(code)) {
      if (cause !== undefined && follows(text, cause.pos[0], pos[0])) continue;
      cause = complaint;
    }
    causes.push(complaint);
  }
  return causes;
}

/** Whether no key at the left margin stands between a mistake and the next. */
function follows(text: string, mistake: number, next: number): boolean {
  const lineAfter = text.indexOf('\n', mistake) + 1 || text.length;
  // One that shows at the beginning of a line is of what was before.
  const from = text[mistake - 1] === '\n' ? mistake : lineAfter;
  const to = text.indexOf('\n', next);
  return !TOP_LEVEL_KEY.test(text.slice(from, to < 0 ? undefined : to));
}

/** In words that say what to look for. */
const REWORDED: readonly [message: RegExp, words: string][] = [
  [/^Flow (?:sequence|map) .*end with a (.)/, 'a bracket before this is not closed: `$1` is missing'],
  [
    /^Nested mappings are not allowed in compact mappings.*/,
    'no map may begin here: is the next line indented too far, or is there a second `:`?',
  ],
  [/^All (mapping|sequence) items must start at the same column.*/, 'this line is not indented as those before it'],
  [/^Sequence item without - indicator.*/, 'this line is indented neither as a list item nor as a key of one'],
];

function* someTokens(tokens: Iterable<CST.Token>): Generator<CST.Token> {
  let misplaced = 0;
  for (const token of tokens) {
    if (token.type === 'error' && ++misplaced > MAX_MISPLACED) return;
    yield token;
  }
}

function rewordSyntax(message: string): string {
  // The parser turns a RangeError of its own into one of the document's.
  if (message.startsWith('Maximum call stack')) return TOO_DEEP;
  for (const [form, words] of REWORDED) {
    const match = form.exec(message);
    if (match !== null) return `YAML: ${words.replace('$1', match[1] ?? '')}`;
  }
  return `YAML: ${message.charAt(0).toLowerCase()}${message.slice(1)}`;
}

/** The `---` that opens a document, or where it begins when only the end of the one before was marked. */
function startOfDocument(text: string, document: Parsed): number {
  const start = document.range[0];
  const marker = text.lastIndexOf('\n---', start) + 1;
  return marker > 0 ? marker : start;
}

function startOf(node: Node | null): number | undefined {
  return node?.range?.[0];
}

/** The text of a plain key; `null` of a map, a list or an alias used as a key. */
function keyText(key: unknown): string | null {
  return isScalar(key) ? String(key.value) : null;
}
