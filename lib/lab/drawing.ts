import { CLIENT_ADDRESS, VIP } from './addresses.js';
import type { Screen } from './screen.js';
import type { Plan } from './shapes.js';

/** Of a box, between its walls. */
const MIN_COLUMNS = 17;
const GAP = '          ';

/** The lab's drawing, and for a one-arm lab the ways that packets take. */
export function drawTopology(screen: Screen, prefix: string, plan: Plan): void {
  screen.line();
  if (plan.nextHops.length === 0) drawInline(screen, prefix, plan);
  else drawOneArm(screen, prefix, plan);
}

function drawInline(screen: Screen, prefix: string, plan: Plan): void {
  const name = (role: string): string => `${prefix}-${role}`;
  const left = box([name('client'), CLIENT_ADDRESS, '']);
  const middle = box([name('gw'), 'weir0  (weir)', `VIP ${VIP}`]);
  const hosts = plan.backends.map((role, i) => screen.hue(`${name(role)} ${plan.lan[role]}`, i));
  const links = ['', '       ┌── ', '───────┼── ', '       └── ', ''];
  for (const [row, text] of left.entries()) {
    const gap = row === 2 ? '─'.repeat(GAP.length) : GAP;
    screen.line(`  ${text}${gap}${middle[row]}${links[row]}${hosts[row - 1] ?? ''}`);
  }
}

function drawOneArm(screen: Screen, prefix: string, plan: Plan): void {
  const name = (role: string): string => `${prefix}-${role}`;
  const { lan, gateways, backends } = plan;
  const columns = Math.max(...Object.keys(lan).map((role) => name(role).length));
  const host = (role: string, what: string): string =>
    `${name(role).padEnd(columns)}  ${lan[role]!.padEnd(9)}  ${what}`;
  const hosts = [
    ...gateways.map((role) => host(role, `weir: gateway of ${VIP}`)),
    ...backends.map((role, i) => screen.hue(host(role, 'weir: node, beside the servers'), i)),
  ];
  const spare = Array.from({ length: hosts.length - 4 }, () => '');
  const left = box([name('client'), CLIENT_ADDRESS, ...spare]);
  const middle = box([name('router'), plan.hubAddress, ...spare]);
  for (const [row, text] of hosts.entries()) {
    const gap = row === 1 ? '─'.repeat(GAP.length) : GAP;
    const corner = row === 0 ? '┌' : row === hosts.length - 1 ? '└' : row === 1 ? '┼' : '├';
    screen.line(`  ${left[row]}${gap}${middle[row]}${row === 1 ? '───' : '   '}${corner}── ${text}`);
  }
  const there = `client ──▶ router ──▶ ${gateways.join(' or ')} ══ Geneve ══▶ b2`;
  const back = 'client ◀── router ◀──';
  screen.line();
  screen.line(`  asked      ${there}`);
  screen.line(`  answered   ${back}${'─'.repeat(there.length - back.length - 3)} b2`);
}

function box(texts: readonly string[]): string[] {
  const columns = Math.max(MIN_COLUMNS, ...texts.map((text) => text.length + 2));
  const rule = '─'.repeat(columns);
  return [`┌${rule}┐`, ...texts.map((text) => `│${` ${text}`.padEnd(columns)}│`), `└${rule}┘`];
}
