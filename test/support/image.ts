import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  chmodSync,
  cpSync,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  realpathSync,
  renameSync,
  rmSync,
  symlinkSync,
  utimesSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import {
  type Cmd,
  type Copy,
  DockerfileParser,
  type Entrypoint,
  type Env,
  type From,
  type Instruction,
  type Label,
} from 'dockerfile-ast';
import { CACHE, makeBareRoot, mountDevices } from './bare-root.js';
import { ENVIRONMENT } from './hosts.js';

/**
 * What `docker build` makes of a Dockerfile, without Docker: its own steps, each in a folder that is laid over those before it, and kept
 * between runs under a name that says what it was made of. One thing is another's: for node:VERSION-trixie-slim stands a Debian trixie with
 * Debian's Node.js, and the npm of this machine.
 *
 * To be called in a mount namespace of the caller's own.
 */
export interface Image {
  /** Folders, the uppermost first. */
  readonly layers: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  readonly workdir: string;
  readonly entrypoint: readonly string[];
  readonly command: readonly string[];
  readonly healthcheck: readonly string[];
  readonly stopSignal: string;
  readonly labels: Readonly<Record<string, string>>;
}

const LAYERS = join(CACHE, 'layers');

/** Layers that no run has asked for in that time are removed. */
const KEPT_MS = 24 * 3600 * 1000;

const KNOWN_BASE = /^node:2\d\.\d+\.\d+-trixie-slim$/;

/** In the official images, and not in a bare Debian. */
const BASE_PACKAGES = 'nodejs passwd';

const NOTHING: Image = {
  layers: [],
  env: {},
  workdir: '/',
  entrypoint: [],
  command: [],
  healthcheck: [],
  stopSignal: 'SIGTERM',
  labels: {},
};

/**
 * @param context the folder with the Dockerfile, of which .dockerignore leaves out most
 * @param folder for what is mounted meanwhile
 */
export function buildImage(context: string, folder: string): Image {
  mkdirSync(LAYERS, { recursive: true });
  const isIgnored = readIgnores(context);
  const stages = new Map<string, Stage>();
  let stage: Stage | undefined;
  const text = readFileSync(join(context, 'Dockerfile'), 'utf8');
  for (const instruction of DockerfileParser.parse(text).getInstructions()) {
    if (instruction.getKeyword() === 'FROM') {
      const from = instruction as From;
      const parent = stages.get(from.getImage()!)?.image ?? baseImage(from.getImage()!);
      stage = new Stage(parent, join(folder, `stage-${stages.size}`));
      stages.set(from.getBuildStage() ?? '', stage);
    } else if (instruction.getKeyword() === 'COPY') {
      const from = (instruction as Copy).getFlags().find((flag) => flag.getName() === 'from');
      const words = instruction.getRawArgumentsContent()!.split(/\s+/);
      const [names, to] = [words.slice(0, -1).filter((word) => !word.startsWith('--')), words.at(-1)!];
      if (from === undefined && names.some(isIgnored)) throw new Error(`.dockerignore leaves out one of ${names}`);
      stage!.copy(from === undefined ? context : stages.get(from.getValue()!)!.mount(), names, to);
    } else stage!.step(instruction);
  }
  return stage!.image;
}

/** @returns where layers are seen as one, to be written to */
export function mountOverlay(layers: readonly string[], folder: string, upper = join(folder, 'upper')): string {
  const [work, root] = [`${upper}.work`, join(folder, 'root')];
  for (const path of [upper, work, root]) mkdirSync(path, { recursive: true });
  sh(`mount -t overlay -o 'lowerdir=${layers.join(':')},upperdir=${upper},workdir=${work}' overlay '${root}'`);
  return root;
}

/** Layers of earlier builds. */
export function removeOldLayers(nowMs: number): void {
  for (const name of readdirSync(LAYERS)) {
    const path = join(LAYERS, name);
    if (lstatSync(path).mtimeMs < nowMs - KEPT_MS) rmSync(path, { recursive: true });
  }
}

class Stage {
  image: Image;
  readonly #folder: string;
  #root: string | null = null;

  constructor(parent: Image, folder: string) {
    this.image = parent;
    this.#folder = folder;
  }

  step(instruction: Instruction): void {
    const text = instruction.getRawArgumentsContent() ?? '';
    const keyword = instruction.getKeyword();
    if (keyword === 'RUN') this.#run(text);
    else if (keyword === 'WORKDIR') this.#enter(text);
    else if (keyword === 'ENV') this.#set({ env: { ...this.image.env, ...properties(instruction as Env) } });
    else if (keyword === 'LABEL') this.#set({ labels: properties(instruction as Label) });
    else if (keyword === 'STOPSIGNAL') this.#set({ stopSignal: text });
    else if (keyword === 'ENTRYPOINT') this.#set({ entrypoint: strings(instruction as Entrypoint) });
    else if (keyword === 'CMD') this.#set({ command: strings(instruction as Cmd) });
    else if (keyword === 'HEALTHCHECK') this.#set({ healthcheck: JSON.parse(text.slice(text.indexOf('['))) });
    else throw new Error(`no way to carry out ${keyword}`);
  }

  copy(from: string, names: readonly string[], to: string): void {
    const target = to.startsWith('/') ? to : join(this.image.workdir, to);
    const digests = names.map((name) => digest(join(from, name)));
    this.#layer(`COPY ${names} ${target} ${digests}`, (upper) => {
      for (const name of names) {
        const into = join(upper, target, to.endsWith('/') ? name : '');
        mkdirSync(dirname(into), { recursive: true });
        // Of a folder, what is in it.
        cpSync(join(from, name), into, { recursive: true, verbatimSymlinks: true });
      }
    });
  }

  /** For later stages, which copy from it. */
  mount(): string {
    this.#root ??= mountOverlay(this.image.layers, this.#folder);
    return this.#root;
  }

  #set(part: Partial<Image>): void {
    this.image = { ...this.image, ...part };
  }

  #enter(workdir: string): void {
    this.#layer(`WORKDIR ${workdir}`, (upper) => mkdirSync(join(upper, workdir), { recursive: true }));
    this.#set({ workdir });
  }

  #run(script: string): void {
    const { layers, env, workdir } = this.image;
    this.#layer(`RUN ${script} ${JSON.stringify(env)} ${workdir}`, (upper) => {
      const root = mountOverlay(layers, join(this.#folder, 'run'), upper);
      try {
        runInside(root, env, workdir, script);
      } finally {
        sh(`umount '${root}'`);
        // What was mounted there is no part of it.
        for (const name of ['root/.npm', 'etc/resolv.conf'])
          rmSync(join(upper, name), { recursive: true, force: true });
        rmSync(`${upper}.work`, { recursive: true });
      }
    });
  }

  #layer(what: string, make: (upper: string) => void): void {
    this.#set({ layers: [keep(`${this.image.layers[0]} ${what}`, make), ...this.image.layers] });
  }
}

/** @returns the layer of that description, made now if there is none yet */
function keep(what: string, make: (path: string) => void): string {
  const path = join(LAYERS, createHash('sha256').update(what).digest('hex').slice(0, 16));
  if (!existsSync(path)) {
    const making = `${path}.${process.pid}`;
    mkdirSync(making);
    try {
      make(making);
      renameSync(making, path);
    } catch (error) {
      rmSync(making, { recursive: true, force: true });
      // Another run may have been first.
      if (!existsSync(path)) throw error;
    }
  }
  const now = new Date();
  utimesSync(path, now, now);
  return path;
}

function baseImage(name: string): Image {
  if (!KNOWN_BASE.test(name)) throw new Error(`nothing stands for the image ${name}`);
  const npm = dirname(dirname(realpathSync(which('npm'))));
  const layer = keep(`trixie ${process.arch} ${BASE_PACKAGES} ${readFileSync(join(npm, 'package.json'))}`, (root) => {
    makeBareRoot(root);
    const install = `apt-get -q update && apt-get -q install -y --no-install-recommends ${BASE_PACKAGES}`;
    try {
      chroot(root, { ...ENVIRONMENT }, '/', install);
    } finally {
      sh(`umount '${root}/var/cache/apt/archives' '${root}/proc' '${root}/dev'`);
    }
    cpSync(npm, join(root, 'usr/local/lib/node_modules/npm'), { recursive: true });
    for (const each of ['npm', 'npx']) {
      symlinkSync(`../lib/node_modules/npm/bin/${each}-cli.js`, join(root, 'usr/local/bin', each));
    }
    // The root of a container is everybody's to see.
    chmodSync(root, 0o755);
  });
  return { ...NOTHING, layers: [layer] };
}

function runInside(root: string, env: Readonly<Record<string, string>>, workdir: string, script: string): void {
  const [archives, packages] = [join(CACHE, 'archives'), join(CACHE, 'npm')];
  for (const path of [archives, packages, `${root}/root/.npm`]) mkdirSync(path, { recursive: true });
  mountDevices(join(root, 'dev'));
  sh(`
    mount -t proc proc '${root}/proc'
    mount -t tmpfs tmpfs '${root}/tmp' && cp /etc/resolv.conf '${root}/etc/'
    mount --bind '${archives}' '${root}/var/cache/apt/archives'
    mount --bind '${packages}' '${root}/root/.npm'`);
  try {
    chroot(root, { ...ENVIRONMENT, ...env, ...trust(root) }, workdir, script);
  } finally {
    sh(`cd '${root}' && umount root/.npm var/cache/apt/archives tmp proc dev`);
  }
}

/** Where this machine trusts certificates of its own, npm has to as well. */
function trust(root: string): Record<string, string> {
  const file = process.env.NODE_EXTRA_CA_CERTS;
  if (file === undefined) return {};
  cpSync(file, join(root, 'tmp/certificates.pem'), { dereference: true });
  return { NODE_EXTRA_CA_CERTS: '/tmp/certificates.pem' };
}

function chroot(root: string, env: Readonly<Record<string, string>>, workdir: string, script: string): void {
  const variables = Object.entries(env).map(([name, value]) => `${name}=${value}`);
  execFileSync('chroot', [root, 'env', '-i', ...variables, 'sh', '-ec', `cd '${workdir}'\n${script}`], {
    stdio: ['ignore', 'ignore', 'pipe'],
  });
}

/** Of a file or a folder: names, modes and contents. */
function digest(path: string): string {
  const hash = createHash('sha256');
  const visit = (at: string): void => {
    const { mode } = lstatSync(at);
    const isLink = (mode & 0o170000) === 0o120000;
    hash.update(`${at.slice(path.length)} ${mode} `);
    if (isLink) hash.update(readlinkSync(at));
    else if ((mode & 0o170000) !== 0o040000) hash.update(readFileSync(at));
    else for (const name of readdirSync(at).sort()) visit(join(at, name));
  };
  visit(path);
  return hash.digest('hex');
}

/** Of what could be written there, `*` and the exceptions from it. */
function readIgnores(context: string): (name: string) => boolean {
  const lines = readFileSync(join(context, '.dockerignore'), 'utf8').split('\n');
  const patterns = lines.filter((line) => line !== '' && !line.startsWith('#'));
  if (patterns[0] !== '*' || !patterns.slice(1).every((each) => /^![\w.-]+$/.test(each))) {
    throw new Error('a .dockerignore of another kind');
  }
  return (name) => !patterns.includes(`!${name}`);
}

function properties(instruction: Env | Label): Record<string, string> {
  return Object.fromEntries(instruction.getProperties().map((each) => [each.getName(), each.getValue() ?? '']));
}

function strings(instruction: Cmd | Entrypoint): string[] {
  return instruction.getJSONStrings().map((each) => each.getJSONValue());
}

function which(name: string): string {
  return execFileSync('sh', ['-c', `command -v ${name}`], { encoding: 'utf8' }).trim();
}

function sh(script: string): void {
  execFileSync('sh', ['-ec', script], { stdio: ['ignore', 'ignore', 'inherit'] });
}
