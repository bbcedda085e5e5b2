import { spawnSync } from 'node:child_process';
import t, { type Test } from 'tap';
import { type Parts, runProgram } from '../../lib/cli/program.js';
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
});

t.test('a shell that is not there is refused', async (t) => {
  t.capture(process.stderr, 'write', () => true);
  t.equal(await runProgram(['node', 'weir', 'completion', 'tcsh'], parts), 2);
});
