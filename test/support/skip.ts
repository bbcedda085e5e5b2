import './plain-children.js';
import { accessSync, constants } from 'node:fs';
import { delimiter, join } from 'node:path';

/** The part of a tap test that is needed here. */
interface Reporter {
  fail(message: string): boolean;
}

/**
 * Options for a test that needs root, /dev/net/tun and some programs: skipped with the reason where one is missing.
 *
 *     t.test('a file arrives whole', needsRoot(t, 'ip', 'curl'), async (t) => { ... });
 *
 * With WEIR_REQUIRE_ROOT_TESTS=1, or with CI=true as root, such a skip is a failure: nobody reads skips there.
 */
export function needsRoot(t: Reporter, ...tools: string[]): { skip?: string } {
  return skipFor(t, !isRoot() ? 'needs root' : !isWritable('/dev/net/tun') ? 'needs /dev/net/tun' : absent(tools));
}

/** The same for a test that needs no more than some programs. */
export function needsTools(t: Reporter, ...tools: string[]): { skip?: string } {
  return skipFor(t, absent(tools));
}

function skipFor(t: Reporter, reason: string | undefined): { skip?: string } {
  if (reason === undefined) return {};
  if (isRequired()) t.fail(`a test that must run here cannot: ${reason}`);
  return { skip: reason };
}

function isRequired(): boolean {
  const { WEIR_REQUIRE_ROOT_TESTS: required, CI: ci } = process.env;
  return required === '1' || (required === undefined && ci === 'true' && isRoot());
}

function absent(tools: readonly string[]): string | undefined {
  const names = tools.filter((tool) => !isInstalled(tool));
  return names.length > 0 ? `needs ${names.join(', ')}` : undefined;
}

function isRoot(): boolean {
  return process.getuid?.() === 0;
}

function isWritable(path: string): boolean {
  try {
    accessSync(path, constants.W_OK);
    return true;
  } catch {
    return false;
  }
}

function isInstalled(tool: string): boolean {
  const folders = [...(process.env.PATH ?? '').split(delimiter), '/usr/sbin', '/sbin'];
  return folders.some((folder) => {
    try {
      accessSync(join(folder, tool), constants.X_OK);
      return true;
    } catch {
      return false;
    }
  });
}
