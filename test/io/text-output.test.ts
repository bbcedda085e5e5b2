import { execFileSync } from 'node:child_process';
import { closeSync, constants, openSync, readFileSync, readSync } from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import t from 'tap';
import { TextOutput } from '../../lib/io/text-output.js';

const LINE = `${'x'.repeat(999)}\n`;

t.test('a pipe that nobody reads keeps nobody waiting; what was lost is counted', async (t) => {
  const path = join(t.testdir(), 'pipe');
  execFileSync('mkfifo', [path]);
  // Open for reading as well, and blocking: as a standard output is, whose reader does not read.
  const fd = openSync(path, constants.O_RDWR);
  t.teardown(() => closeSync(fd));
  const output = new TextOutput(fd);
  let lost = 0;
  output.onLost = (lines) => {
    lost += lines;
  };
  const sent = 2000;
  for (let i = 0; i < sent; i++) output.write(LINE);
  t.equal(lost, 0, 'nothing is told while there is no room');
  const buffer = Buffer.alloc(65536);
  let text = '';
  const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  t.teardown(() => closeSync(reader));
  const drain = (): void => {
    try {
      for (;;) text += buffer.toString('utf8', 0, readSync(reader, buffer));
    } catch (error) {
      t.equal((error as NodeJS.ErrnoException).code, 'EAGAIN');
    }
  };
  while (lost === 0) {
    drain();
    output.write(LINE);
  }
  drain();
  output.end();
  const lines = text.split('\n').slice(0, -1);
  t.ok(
    lines.every((line) => `${line}\n` === LINE),
    'what comes is whole',
  );
  t.ok(lines.length > 1000 && lost > 500, `${lines.length} lines came, ${lost} were lost`);
});

t.test('a socket that nobody reads, likewise', async (t) => {
  const path = join(t.testdir(), 'socket');
  const accepted = new Promise<Socket>((resolve) => {
    const server = createServer({ pauseOnConnect: true }, (socket) => resolve(socket)).listen(path);
    t.teardown(() => server.close());
  });
  const client = connect(path);
  const server = await accepted;
  t.teardown(() => {
    client.destroy();
    server.destroy();
  });
  const output = new TextOutput((client as unknown as { _handle: { fd: number } })._handle.fd);
  for (let i = 0; i < 4000; i++) output.write(LINE);
  output.end();
  t.pass('all calls have returned');
});

t.test('a file has every line; a descriptor that is closed harms nobody', async (t) => {
  const path = join(t.testdir({ log: '' }), 'log');
  const fd = openSync(path, 'a');
  const output = new TextOutput(fd);
  for (let i = 0; i < 100; i++) output.write(`${i}\n`);
  output.end();
  t.equal(readFileSync(path, 'utf8'), Array.from({ length: 100 }, (_, i) => `${i}\n`).join(''));
  closeSync(fd);
  new TextOutput(fd).write('nobody\n');
});
