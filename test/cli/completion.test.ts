import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { serveAdmin } from '../../lib/admin/serve.js';
import { type Parts, runProgram } from '../../lib/cli/program.js';
import { runCommand } from '../support/command-line.js';
import { backend, FakeWeir } from '../support/fake-weir.js';
import { needsTools } from '../support/skip.js';

const parts: Parts = {
  version: '1.2.3',
  run: async () => 0,
  replay: async () => ({ packets: 0, emitted: 0, seconds: 0, verdicts: {} }),
  lab: async () => 0,
};

async function script(t: Test, shell: string): Promise<string> {
  let text = '';
  const capture = t.capture(process.stdout, 'write', (chunk: string) => {
    text += chunk;
    return true;
  });
  const code = await runProgram(['node', 'weir', 'completion', shell], parts);
  capture.restore();
  t.equal(code, 0);
  return text;
}

t.test('bash offers what commander has', needsTools(t, 'bash'), async (t) => {
  const text = await script(t, 'bash');
  const complete = (...words: string[]): string[] => {
    const list = ['weir', ...words].map((word) => `'${word}'`).join(' ');
    const run = `${text}\nCOMP_WORDS=(${list}); COMP_CWORD=${words.length}; _weir; printf '%s\\n' "\${COMPREPLY[@]}"`;
    const { stdout, stderr, status } = spawnSync('bash', ['-c', run], { encoding: 'utf8' });
    t.strictSame([status, stderr], [0, '']);
    return stdout.split('\n').filter(Boolean).sort();
  };
  t.strictSame(complete('st'), ['status']);
  t.strictSame(complete('re'), ['reload', 'replay']);
  t.ok(complete('').includes('run') && complete('').includes('--version'));
  t.strictSame(complete('ct', ''), ['--help', '-h', 'export', 'flush', 'import', 'list', 'stats', 'watch']);
  t.strictSame(complete('ct', 'li'), ['list']);
  t.strictSame(complete('ct', 'list', '--s'), ['--service', '--socket', '--state']);
  t.strictSame(complete('ct', 'list', '--service', 'web', '--cl'), ['--client'], 'options do not lead astray');
  t.strictSame(complete('ct', 'list', '-o', ''), ['cilium', 'conntrack', 'json', 'table']);
  t.strictSame(complete('ct', 'list', '--output', 'c'), ['cilium', 'conntrack']);
  t.strictSame(complete('status', '--output', ''), ['json', 'table']);
  t.strictSame(complete('run', '-c', ''), [], 'a file: for the shell to complete');
  t.strictSame(complete('doctor', '-'), ['--config', '--help', '--output', '-c', '-h', '-o']);
  t.strictSame(complete('lab', 'd'), ['demo', 'down']);
  t.strictSame(complete('capture', '--sn'), ['--snaplen']);
  t.strictSame(complete('completion', ''), ['--help', '-h', 'bash', 'fish', 'zsh']);
  t.strictSame(complete('export', ''), ['--config', '--help', '-c', '-h', 'iptables', 'nft']);
  t.strictSame(complete('import', 'k'), ['kubernetes']);
  t.strictSame(complete('import', 'kubernetes', '--w'), ['--watch']);
  t.strictSame(complete('import', 'ipvs', '--base', ''), [], 'a file: for the shell to complete');
  t.strictSame(complete('nonsense'), []);
});

t.test('names of services and backends come from a running weir', needsTools(t, 'bash'), async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-completion-'));
  const socket = join(folder, 'weir.sock');
  const running = new FakeWeir();
  running.backends = [
    backend('b1'),
    { ...backend('b2'), drainedBy: 'command' },
    { ...backend('b3'), removed: true },
    backend('10.2.0.11:8080'),
    backend('10.2.0.11:8081'),
  ];
  const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  t.teardown(async () => {
    await admin.close();
    rmSync(folder, { recursive: true });
  });
  const names = async (...words: string[]): Promise<string[]> => {
    const args = words.map((word) => (word === 'SOCKET' ? socket : word));
    const { code, stdout, stderr } = await runCommand(parts, ['__complete', '--', ...args]);
    t.strictSame([code, stderr], [0, '']);
    return stdout.split('\n').filter(Boolean);
  };
  const at = ['--socket', 'SOCKET'];
  t.strictSame(await names('drain', ...at, ''), ['web']);
  t.strictSame(await names('drain', ...at, 'x'), []);
  t.strictSame(await names('drain', ...at, 'web', ''), ['b1', '10.2.0.11:8080', '10.2.0.11:8081']);
  t.strictSame(await names('drain', 'web', ...at, '10.2.0.11', ':', '80'), ['8080', '8081'], 'as bash cuts words');
  t.strictSame(await names('drain', 'web', ...at, '10.2.0.11', ':'), ['8080', '8081']);
  t.strictSame(
    await names('drain', 'web', ...at, '10.2.0.11:80'),
    ['10.2.0.11:8080', '10.2.0.11:8081'],
    'as others do',
  );
  t.strictSame(await names('drain', ...at, 'api', ''), []);
  t.strictSame(await names('drain', ...at, 'web', 'b1', ''), []);
  t.strictSame(await names('drain', ...at, '-o', ''), []);
  t.strictSame(await names('undrain', ...at, 'web', ''), ['b2'], 'what is drained');
  t.strictSame(await names('ct', 'list', ...at, '--service', ''), ['web']);
  t.strictSame(await names('ct', 'list', ...at, '--service', '=', 'w'), ['web']);
  t.strictSame(await names('capture', ...at, '--backend', 'web/b'), ['web/b1', 'web/b2', 'web/b3']);
  t.strictSame(await names('maglev', ''), [], 'not of a running weir');
  t.strictSame(await names('drain', '--socket', '/nonexistent', ''), [], 'where none runs');
  t.strictSame(await names(), []);

  const stub = join(folder, 'weir');
  writeFileSync(stub, `#!/bin/sh\nprintf '%s\\n' "$@" >'${folder}/asked'; printf 'b1\\nb2\\n'\n`, { mode: 0o755 });
  const text = await script(t, 'bash');
  const reply = (...words: string[]): string[] => {
    const list = [stub, ...words].map((word) => `'${word}'`).join(' ');
    const run = `${text}\nCOMP_WORDS=(${list} later); COMP_CWORD=${words.length}; _weir; printf '%s\\n' "\${COMPREPLY[@]}"`;
    const { stdout, stderr } = spawnSync('bash', ['-c', run], { encoding: 'utf8' });
    t.equal(stderr, '');
    return stdout.split('\n').filter(Boolean);
  };
  t.strictSame(reply('drain', 'web', ''), ['b1', 'b2']);
  t.equal(readFileSync(join(folder, 'asked'), 'utf8'), '__complete\n--\ndrain\nweb\n\n', 'with what was typed so far');
  t.strictSame(reply('ct', 'list', '--service', ''), ['b1', 'b2']);
  t.strictSame(reply('drain', 'web', '--so'), ['--socket'], 'options are still known without asking');
  t.strictSame(reply('maglev', ''), ['-c', '--config', '-o', '--output', '-h', '--help']);
});

t.test('the others have the same words', async (t) => {
  const zsh = await script(t, 'zsh');
  t.match(zsh, /^autoload -U \+X bashcompinit && bashcompinit\n_weir\(\) \{/);
  t.notMatch(zsh, /\blocal [^\n]*\b(path|words)\b/, 'zsh has variables of these names');
  const fish = await script(t, 'fish');
  t.match(fish, /^complete -c weir -n 'not __fish_seen_subcommand_from run .*' -a status -d '/m);
  t.match(
    fish,
    /^complete -c weir -n '__fish_seen_subcommand_from ct; and __fish_seen_subcommand_from list' -s o -x -a '/m,
  );
  t.match(
    fish,
    "complete -c weir -n '__fish_seen_subcommand_from drain' -f -a '(weir __complete -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'",
  );
});

t.test('a shell that is not there is refused', async (t) => {
  t.capture(process.stderr, 'write', () => true);
  t.equal(await runProgram(['node', 'weir', 'completion', 'tcsh'], parts), 2);
});
