import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';

/** Between runs: the making of a root takes most of a minute, its packages the rest of it. */
const CACHE = process.env.WEIR_TEST_CACHE ?? '/var/cache/weir-test';

const SUITE = 'trixie';
const MIRROR = process.env.WEIR_TEST_MIRROR ?? 'http://deb.debian.org/debian';

/** What a shell and apt need of /dev, and weir; modes as udev gives them. */
const DEVICES = 'null:c:1:3 zero:c:1:5 full:c:1:7 random:c:1:8 urandom:c:1:9 tty:c:5:0 net/tun:c:10:200';

/**
 * Unpacks a Debian with nothing but its essential packages and apt into a folder, and makes it one to run commands in: /proc, /dev, and
 * the host's name servers. To be called in a mount namespace of the caller's own, with the host's network.
 */
export function makeBareRoot(root: string): void {
  const archive = bareArchive();
  mkdirSync(root, { recursive: true });
  execFileSync('tar', ['--extract', '--file', archive, '--directory', root]);
  const packages = join(CACHE, 'archives');
  mkdirSync(packages, { recursive: true });
  sh(`mount -t tmpfs -o mode=755 tmpfs '${root}/dev' && mkdir '${root}/dev/net'`);
  for (const device of DEVICES.split(' ')) {
    const [name, ...numbers] = device.split(':');
    sh(`mknod -m 666 '${root}/dev/${name}' ${numbers.join(' ')}`);
  }
  sh(`mount -t proc proc '${root}/proc' && cp /etc/resolv.conf '${root}/etc/resolv.conf'`);
  sh(`mkdir -p '${root}/var/cache/apt/archives' && mount --bind '${packages}' '${root}/var/cache/apt/archives'`);
}

/** @returns the archive's path; made on first use, by one process at a time */
export function bareArchive(): string {
  const archive = join(CACHE, `debian-${SUITE}-${process.arch}.tar`);
  if (existsSync(archive)) return archive;
  mkdirSync(CACHE, { recursive: true });
  const making = join(CACHE, 'making.tar');
  const make = `mmdebstrap --quiet --variant=apt --mode=root ${SUITE} ${making} ${MIRROR} && mv ${making} ${archive}`;
  sh(`flock '${CACHE}/lock' sh -c '[ -e ${archive} ] || { ${make}; }'`);
  return archive;
}

function sh(script: string): void {
  execFileSync('sh', ['-ec', script], { stdio: ['ignore', 'ignore', 'inherit'] });
}
