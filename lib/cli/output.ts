/** Writes to standard output, and waits when the reader is slower. */
export function print(text: string | Uint8Array): Promise<void> {
  return new Promise((resolve) => {
    if (process.stdout.write(text)) resolve();
    else process.stdout.once('drain', resolve);
  });
}

export function printJson(value: unknown): Promise<void> {
  return print(`${JSON.stringify(value, null, 2)}\n`);
}

/** A reader that has seen enough (`weir ct list | head`) ends the command, without a word. */
export function leaveWithReader(): void {
  process.stdout.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code === 'EPIPE') process.exit(0);
    console.error(`weir: cannot write the output: ${error.code ?? error.message}.`);
    process.exit(1);
  });
}
