import type { Argument, Command, Option } from 'commander';
import type { ServiceView } from '../control/view.js';
import { callJson } from './client.js';

/** What a running weir knows the values of. */
type Kind = 'service' | 'backend';

/** Nobody waits longer for a list while typing. */
const ANSWER_MS = 1000;

/** Whether an option's value or an argument is a name that a running weir knows. */
function kindOf(command: Command, { name }: { name: string }): Kind | undefined {
  const isAsked = command.options.some(({ long }) => long === '--socket');
  return isAsked && (name === 'service' || name === 'backend') ? name : undefined;
}

export function kindOfArgument(command: Command, argument: Argument | undefined): Kind | undefined {
  return argument && kindOf(command, { name: argument.name() });
}

export function kindOfOption(command: Command, option: Option): Kind | undefined {
  return kindOf(command, { name: option.attributeName() });
}

/**
 * The names that may stand at the last of these words, as a running weir has them; none when there is none, or it does not answer.
 *
 * @param words what was typed after the program's name; bash gives `10.2.0.11:80` as three
 */
export async function completeNames(program: Command, words: readonly string[]): Promise<string[]> {
  const typed = glue(words);
  const current = typed.at(-1) ?? '';
  const place = findPlace(program, typed.slice(0, -1));
  if (place.kind === undefined || (place.option === undefined && current.startsWith('-'))) return [];
  const { command, values, positionals } = place;
  const socketOption = command.options.find(({ long }) => long === '--socket');
  const socket = values.get('socket') ?? process.env.WEIR_SOCKET ?? String(socketOption?.defaultValue);
  let services: ServiceView[];
  try {
    services = await callJson({ socket, path: '/v1/services', signal: AbortSignal.timeout(ANSWER_MS) });
  } catch {
    return [];
  }
  const isSplit = current !== words.at(-1);
  return namesOf(place.kind, services, place.option === undefined ? command.name() : '', positionals[0])
    .filter((name) => name.startsWith(current))
    .map((name) => (isSplit ? name.slice(current.lastIndexOf(':') + 1) : name));
}

function namesOf(kind: Kind, services: readonly ServiceView[], verb: string, service: string | undefined): string[] {
  if (verb === '') {
    return kind === 'service'
      ? services.map(({ name }) => name)
      : services.flatMap(({ name, backends }) => backends.map((backend) => `${name}/${backend.name}`));
  }
  // What can be drained, or is, by command.
  const of = ({ backends }: ServiceView): string[] =>
    backends
      .filter(({ removed, drainedBy }) => !removed && (drainedBy === 'command') === (verb === 'undrain'))
      .map(({ name }) => name);
  return kind === 'service'
    ? services.filter((each) => of(each).length > 0).map(({ name }) => name)
    : services.filter(({ name }) => name === service).flatMap(of);
}

interface Place {
  readonly command: Command;
  readonly kind: Kind | undefined;
  /** Whose value comes next. */
  readonly option: Option | undefined;
  readonly values: ReadonlyMap<string, string>;
  readonly positionals: readonly string[];
}

/** Where whoever has typed these words has come to. */
function findPlace(program: Command, words: readonly string[]): Place {
  let command = program;
  let option: Option | undefined;
  const values = new Map<string, string>();
  const positionals: string[] = [];
  for (const word of words) {
    if (option !== undefined) {
      values.set(option.attributeName(), word);
      option = undefined;
    } else if (word.startsWith('-')) {
      option = command.options.find((each) => [each.short, each.long].includes(word) && each.required);
    } else {
      const next = command.commands.find((each) => each.name() === word);
      if (next === undefined) positionals.push(word);
      else command = next;
    }
  }
  const kind =
    option === undefined
      ? kindOfArgument(command, command.registeredArguments[positionals.length])
      : kindOfOption(command, option);
  return { command, kind, option, values, positionals };
}

/** Undoes what bash does to words with colons and equals signs. */
function glue(words: readonly string[]): string[] {
  const glued: string[] = [];
  let isOpen = false;
  for (const word of words) {
    if (word === '=') continue;
    if (glued.length > 0 && (word === ':' || isOpen)) glued[glued.length - 1] += word;
    else glued.push(word);
    isOpen = word === ':';
  }
  return glued;
}
