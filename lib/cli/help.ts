import { type Command, Help, type HelpConfiguration } from 'commander';

/** Says which options cannot be left out. */
export const HELP: HelpConfiguration = {
  optionDescription(option) {
    const description = Help.prototype.optionDescription.call(this, option);
    return option.mandatory ? `${description} (required)` : description;
  },
};

/** Gives a tree of commands `help`, for the whole tree and each group in it: `weir help ct list` is `weir ct list --help`. */
export function addHelp(group: Command): void {
  for (const each of group.commands) if (each.commands.length > 0) addHelp(each);
  group
    .helpCommand(false)
    .command('help')
    .description('Show the help of a command.')
    .helpOption(false)
    .argument('[command...]', 'the words that name it')
    .action(async (words: readonly string[]) => {
      let named = group;
      for (const word of words) {
        const next = named.commands.find((each) => each.name() === word || each.aliases().includes(word));
        if (next === undefined) return unknown(named, word);
        named = next;
      }
      named.outputHelp();
    });
}

async function unknown(parent: Command, word: string): Promise<void> {
  // A group says it itself, with what may have been meant.
  if (parent.commands.length > 0) await parent.parseAsync([word], { from: 'user' });
  else parent.error(`error: unknown command '${word}'`);
}
