import { YamlSource } from './yaml-source.js';

/**
 * What a text says, read faster than whole when most of it was read before. Parsing YAML takes a second of a configuration with 10,000
 * backends, and of nearly every reload all but a few lines are as they were. The members of the top-level list `services` are cut out by
 * their indentation and parsed one by one; those whose text is known are not parsed again.
 *
 *     head       device: ...          parsed, with a mark in the place of the members
 *                services:
 *     members      - name: web        each parsed as a list of one
 *                  - name: dns
 *     tail       admin: ...           parsed with the head
 *
 * The law: either nothing is said (`undefined`) or exactly what a YamlSource of the whole text says, without any mistake. So whatever could
 * mean something else in parts is left to that: mistakes of any kind, anchors and aliases (which reach across members), other documents, a
 * list in brackets, JSON. That the mark is found where the members belong tells that `services:` is no part of a value. A line that looks
 * like a member's first and is inside of a quoted or bracketed value leaves a member before it that does not end, which is a mistake;
 * inside of a block of text it would stand further right.
 */
export class YamlPieces {
  /** Members of the text last read. */
  #known: ReadonlyMap<string, unknown> = new Map();

  read(text: string): unknown {
    const cut = cutMembers(text);
    if (cut === undefined) return undefined;
    const root = valueIn(cut.frame);
    if (!isMap(root) || root.services !== MARK) return undefined;
    const read = new Map<string, unknown>();
    const services: unknown[] = [];
    for (const member of cut.members) {
      let value = this.#known.get(member) ?? read.get(member);
      if (value === undefined) {
        const list = valueIn(member);
        if (!Array.isArray(list) || list.length !== 1) return undefined;
        value = list[0] as unknown;
        if (!isMap(value)) return undefined;
      }
      read.set(member, value);
      services.push(value);
    }
    this.#known = read;
    return { ...root, services };
  }
}

/** Stands for the members. Nobody writes it. */
const MARK = 'members-of-services';

/** A map in brackets, which has no lists without. */
const BRACKETS = /^( *(#.*)?\n)* *\{/;

/** Anchors, aliases and tags at the beginning of a value; directives; marks of documents; tabs and carriage returns. */
const ELSEWHERE = /(^|[\s,[{:?-])[&*!]|^%|^---|^\.\.\.|[\t\r\ufeff]/m;

interface Cut {
  /** All but the members. */
  readonly frame: string;
  readonly members: readonly string[];
}

function cutMembers(text: string): Cut | undefined {
  if (ELSEWHERE.test(text) || BRACKETS.test(text) || text.includes(MARK)) return undefined;
  const head = /^services:[ ]*(#.*)?\n/m.exec(text);
  if (head === null) return undefined;
  const start = head.index + head[0].length;
  const first = /^( *)- /m.exec(text.slice(start));
  if (first === null || !isBlank(text.slice(start, start + first.index))) return undefined;
  const begins = `${first[1]}- `;
  const members: string[] = [];
  let from = start + first.index;
  let at = from;
  while (at < text.length) {
    const end = text.indexOf('\n', at);
    const next = end < 0 ? text.length : end + 1;
    const isFirstLine = text.startsWith(begins, at);
    if (isFirstLine && at > from) {
      members.push(text.slice(from, at));
      from = at;
    }
    if (!isFirstLine && !' #\n'.includes(text[at]!)) break;
    at = next;
  }
  members.push(text.slice(from, at));
  return { frame: `${text.slice(0, head.index)}services: ${MARK}\n${text.slice(at)}`, members };
}

function isBlank(text: string): boolean {
  return /^( *(#.*)?\n)*$/.test(text);
}

/** What a text says; undefined: it has mistakes, or says nothing. */
function valueIn(text: string): unknown {
  const { value, faults } = new YamlSource(text);
  return faults.length > 0 ? undefined : value;
}

function isMap(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
