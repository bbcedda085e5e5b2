import type { Command, Option } from 'commander';
import { kindOfArgument, kindOfOption } from './complete-names.js';

/**
 * Completion scripts for shells, made from the tree of commands itself: what is not in it cannot be offered, and what is in it
 * cannot be missing. Each script is a table, by the words that name a command, of the words that may come next.
 */
export const SHELLS = ['bash', 'zsh', 'fish'] as const;

export type Shell = (typeof SHELLS)[number];

/** One command of the tree, or the program: `path` has the words that name it, without the program's own name. */
interface Node {
  readonly path: string;
  readonly words: readonly { readonly word: string; readonly description: string }[];
  /** Options that take a value, by each of their spellings: its choices, where it has any. */
  readonly values: readonly Value[];
  /** Its arguments are names that a running weir is asked for. */
  readonly hasNames: boolean;
}

interface Value {
  readonly flags: readonly string[];
  readonly choices: readonly string[];
  /** It is a name that a running weir is asked for. */
  readonly isName: boolean;
}

/** Not for people: prints the names that may come next, for the scripts. */
export const NAMES_COMMAND = '__complete';

/** @returns the script for a shell to read: `source <(weir completion bash)` */
export function completionScript(program: Command, shell: Shell): string {
  const nodes = listNodes(program, []);
  switch (shell) {
    case 'bash':
      return bashScript(program.name(), nodes);
    case 'zsh':
      // zsh reads the functions of bash.
      return `autoload -U +X bashcompinit && bashcompinit\n${bashScript(program.name(), nodes)}`;
    case 'fish':
      return fishScript(program.name(), nodes);
  }
}

function listNodes(command: Command, path: readonly string[]): Node[] {
  const help = command.createHelp();
  const subcommands = help.visibleCommands(command).filter((each) => each.name() !== 'help');
  const options = help.visibleOptions(command);
  const choices = command.registeredArguments.flatMap(({ argChoices }) => argChoices ?? []);
  const node = {
    path: path.join(' '),
    words: [
      ...subcommands.map((each) => ({ word: each.name(), description: each.description() })),
      ...choices.map((word) => ({ word, description: '' })),
      ...options.flatMap((option) => flagsOf(option).map((word) => ({ word, description: option.description }))),
    ],
    values: options.filter(takesValue).map((option) => ({
      flags: flagsOf(option),
      choices: option.argChoices ?? [],
      isName: kindOfOption(command, option) !== undefined,
    })),
    hasNames: command.registeredArguments.some((argument) => kindOfArgument(command, argument) !== undefined),
  };
  return [node, ...subcommands.flatMap((each) => listNodes(each, [...path, each.name()]))];
}

function flagsOf({ short, long }: Option): string[] {
  return [short, long].filter((flag) => flag !== undefined);
}

function takesValue({ required, optional }: Option): boolean {
  return required || optional;
}

/**
 * Names of services and backends are asked for when they are wanted. Where another value is expected that has no choices, and where an argument may be a file, the shell completes file names. No variable is
 * called `path` or `words`: to zsh these are its own.
 */
function bashScript(name: string, nodes: readonly Node[]): string {
  const paths = nodes.filter(({ path }) => path !== '').map(({ path }) => quote(path));
  const words = nodes.map(
    ({ path, words }) => `    ${quote(path)}) offered=${quote(words.map(({ word }) => word).join(' '))} ;;`,
  );
  const values = nodes.flatMap(({ path, values }) =>
    values.map(({ flags, choices, isName }) => {
      const found = isName ? 'isName=1' : `offered=${quote(choices.join(' '))}`;
      return `    ${flags.map((flag) => quote(`${path} ${flag}`)).join('|')}) ${found}; isValue=1 ;;`;
    }),
  );
  const named = nodes.filter(({ hasNames }) => hasNames).map(({ path }) => quote(path));
  return `_${name}() {
  local at='' next offered='' isValue='' isName='' i
  local current=\${COMP_WORDS[COMP_CWORD]} before=\${COMP_WORDS[COMP_CWORD-1]}
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="\${at:+$at }\${COMP_WORDS[i]}"
    case "$next" in
    ${paths.join('|')}) at=$next ;;
    esac
  done
  case "$at $before" in
${values.join('\n')}
  esac
  [[ $isValue ]] || case "$at" in
${words.join('\n')}
  esac
  [[ $isValue || $current == -* ]] || case "$at" in
    ${named.join('|')}) isName=1 ;;
  esac
  if [[ $isName ]]; then
    compopt +o default 2>/dev/null
    COMPREPLY=($("\${COMP_WORDS[0]}" ${NAMES_COMMAND} -- "\${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    return
  fi
  COMPREPLY=($(compgen -W "$offered" -- "$current"))
}
complete -o default -F _${name} ${name}
`;
}

function fishScript(name: string, nodes: readonly Node[]): string {
  const lines = [`complete -c ${name} -n 'test (count (commandline -opc)) -eq 1' -f`];
  const groups = new Set(nodes.map(({ path }) => path.split(' ').slice(0, -1).join(' ')));
  const names = `'(${name} ${NAMES_COMMAND} -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'`;
  for (const { path, words, values, hasNames } of nodes) {
    const seen = path === '' ? [] : path.split(' ').map((word) => `__fish_seen_subcommand_from ${word}`);
    const isGroup = path === '' || groups.has(path);
    const children = words.filter(({ word }) => !word.startsWith('-')).map(({ word }) => word);
    const condition = [...seen, ...(isGroup ? [`not __fish_seen_subcommand_from ${children.join(' ')}`] : [])].join(
      '; and ',
    );
    if (hasNames) lines.push(`complete -c ${name} -n ${quote(condition)} -f -a ${names}`);
    for (const { word, description } of words) {
      const choices = values.find(({ flags }) => flags.includes(word));
      const what = word.startsWith('--')
        ? `-l ${word.slice(2)}`
        : word.startsWith('-')
          ? `-s ${word.slice(1)}`
          : `-a ${word}`;
      const takes =
        choices === undefined
          ? ''
          : choices.isName
            ? ` -x -a ${names}`
            : choices.choices.length > 0
              ? ` -x -a ${quote(choices.choices.join(' '))}`
              : ' -r';
      lines.push(`complete -c ${name} -n ${quote(condition)} ${what}${takes} -d ${quote(description)}`);
    }
  }
  return `${lines.join('\n')}\n`;
}

function quote(text: string): string {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
