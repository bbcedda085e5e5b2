import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { needsRoot } from './support/skip.js';

/*
 * Every block of commands in the documentation is run: a page's ```sh blocks one after the other in one shell that stops at the
 * first command that fails, in namespaces of their own (network, mounts, processes), of which nothing is left.
 *
 *     host      a machine with nothing on it
 *     gateway   the gateway of a lab; weir runs there by the page's own configuration (the yaml block that says `# weir.yaml`), or
 *               the lab's, unless the page starts it
 *
 * Blocks that name a host of their own (```sh gateway) are run on it by test/docs/install.test.ts.
 */
type Stage = 'host' | 'gateway';

const PAGES: Readonly<Record<string, Stage>> = {
  'README.md': 'gateway',
  'docs/api.md': 'gateway',
  'docs/dashboard.md': 'gateway',
  'docs/export-import.md': 'host',
  'docs/operating.md': 'gateway',
  'docs/tutorial.md': 'host',
};

/** Blocks that are run elsewhere, or cannot be, by how they begin. */
const ELSEWHERE: Readonly<Record<string, string>> = {
  'npm ci && npm run demo': 'by CI, which this test is a part of, and by test/lab',
};

const root = fileURLToPath(new URL('..', import.meta.url));

interface Block {
  readonly language: string;
  readonly text: string;
}

function blocksOf(page: string): Block[] {
  const text = readFileSync(join(root, page), 'utf8');
  return [...text.matchAll(/^```([^\n]*)\n(.*?)^```$/gms)].map(([, language, text]) => ({
    language: language!,
    text: text!,
  }));
}

function commandsOf(page: string): string[] {
  const blocks = blocksOf(page).filter(({ language }) => language === 'sh');
  return blocks
    .map(({ text }) => text)
    .filter((text) => !Object.keys(ELSEWHERE).some((beginning) => text.startsWith(beginning)));
}

/**
 * What goes on until it is stopped is stopped after two seconds; a weir that runs goes on beside the others. Of programs with windows
 * there is only what they read.
 */
const HABITS = `
npx() { "$@"; }
wireshark() { cat > /dev/null; }
weir() {
  case "$1 \${2:-}" in
    run*) setsid "$WEIR" "$@" > run.log 2>&1 & until "$WEIR" status > /dev/null 2>&1; do kill -0 $! || { cat run.log; return 1; }; sleep 0.1; done ;;
    "ct watch" | top* | capture*) timeout -s INT 2 "$WEIR" "$@" || test $? = 124 ;;
    *) "$WEIR" "$@" ;;
  esac
}
`;

/** A script that sets a stage for `page.sh`, with the weir of this checkout as \`weir\`. */
function stageScript(stage: Stage, startsWeir: boolean): string {
  const isolated = `
set -euo pipefail
mount -t tmpfs tmpfs /run
export PATH="$PWD/bin:$PATH" WEIR="$PWD/bin/weir"
ip link set lo up
`;
  if (stage === 'host') return `${isolated}bash -x page.sh\n`;
  return `${isolated}
weir lab up > /dev/null
kill "$(WEIR_SOCKET=/run/weir-lab/weir.sock weir status -o json | sed -n 's/.*"pid": *\\([0-9]*\\).*/\\1/p')"
[ -e weir.yaml ] || cp /run/weir-lab/weir.yaml weir.yaml
sed 's/weight: 1/weight: 2/' weir.yaml > next.yaml
mkdir -p /run/weir
ip netns exec weir-gw bash -c '. ./habits.sh; set -euo pipefail
  ${startsWeir ? '' : 'weir run -c weir.yaml'}
  set -x; . ./page.sh'
`;
}

const pages = ['README.md', ...readdirSync(join(root, 'docs')).map((name) => `docs/${name}`)].filter((name) =>
  name.endsWith('.md'),
);

t.test('every page with commands has a stage, and every exception is one', async (t) => {
  const withCommands = pages.filter((page) => commandsOf(page).length > 0);
  t.strictSame(withCommands.sort(), Object.keys(PAGES).sort());
  const all = pages.flatMap((page) => blocksOf(page).map(({ text }) => text));
  for (const beginning of Object.keys(ELSEWHERE))
    t.ok(
      all.some((text) => text.startsWith(beginning)),
      beginning,
    );
});

for (const [page, stage] of Object.entries(PAGES)) {
  t.test(`the commands of ${page}`, needsRoot(t, 'ip', 'curl', 'unshare', 'bash'), async (t) => {
    const folder = mkdtempSync(join(tmpdir(), 'weir-docs-'));
    t.teardown(() => rmSync(folder, { recursive: true }));
    mkdirSync(join(folder, 'bin'));
    writeFileSync(join(folder, 'bin/weir'), `#!/bin/sh\nexec "${process.execPath}" "${root}/bin/weir.js" "$@"\n`, {
      mode: 0o755,
    });
    const commands = commandsOf(page);
    const config = blocksOf(page).find(({ text }) => text.startsWith('# weir.yaml\n'));
    if (config !== undefined) writeFileSync(join(folder, 'weir.yaml'), config.text);
    writeFileSync(join(folder, 'habits.sh'), HABITS);
    writeFileSync(join(folder, 'page.sh'), `set -euo pipefail\n${commands.join('\n')}`);
    const script = stageScript(
      stage,
      commands.some((text) => /\bweir run\b/.test(text)),
    );
    writeFileSync(join(folder, 'stage.sh'), script);
    const isolation = ['--mount', '--net', '--pid', '--fork', '--kill-child', '--mount-proc'];
    const { status, stdout, stderr } = spawnSync('unshare', [...isolation, 'bash', 'stage.sh'], {
      cwd: folder,
      encoding: 'utf8',
      timeout: 600_000,
      killSignal: 'SIGKILL',
    });
    t.equal(status, 0, `${commands.length} blocks end well`);
    if (status !== 0) t.comment(`${stdout}\n${stderr}`.split('\n').slice(-40).join('\n'));
  });
}
