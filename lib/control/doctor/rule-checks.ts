import type { Config } from '../../config/config.js';
import { MAIN_TABLE } from '../iproute.js';
import { networkNeeds, RETURN_PRIORITY, type ReturnEndpoint } from '../network-plan.js';
import { usesTunnel } from '../tunnel-plan.js';
import { Check, type Finding } from './finding.js';
import { type Chain, type Firewall, type FirewallRule, meetsAddress, meetsPort, passageThrough } from './firewall.js';
import type { ForeignRule, NetworkFacts } from './network-facts.js';
import { holds, parsePrefix } from './prefix.js';

/** What others have told the kernel to do with the same packets: policy rules, firewalls, the kernel's own connection tracking. */
export function checkRules(config: Config, facts: NetworkFacts): Finding[] {
  return [...checkPolicyRules(config, facts), ...checkFirewall(config, facts), ...checkKernelConntrack(facts)];
}

/** weir's rules stand from 1000 to 1002, its routes to VIPs in main, which is asked at 32766. */
const MAIN_PRIORITY = 32766;

/** Behind weir's own. */
const LATER_PRIORITY = 1500;

function checkPolicyRules(config: Config, facts: NetworkFacts): Finding[] {
  const { addresses, endpoints } = networkNeeds(config);
  const check = new Check('policy-rules', 'rules that are asked before weir’s must not lead its packets elsewhere');
  const before = facts.rules.filter(({ priority }) => priority > 0 && priority < MAIN_PRIORITY);
  for (const address of addresses) {
    const found = ruleForVip(before, facts, endpoints, parsePrefix(address).address);
    if (found === undefined) continue;
    const mend = `ip rule add priority ${found.priority - 1} to ${address} lookup main`;
    const what = `priority ${found.priority} ${found.text} is asked for ${address} before main`;
    return [found.isPartial ? check.warn(`${what}, for some packets`, mend) : check.fail(what, mend)];
  }
  for (const endpoint of endpoints) {
    const found = ruleForAnswers(before, facts, endpoint);
    if (found === undefined) continue;
    const mend = `ip rule del priority ${found.priority} ${found.text} && ip rule add priority ${LATER_PRIORITY} ${found.text}`;
    const what = `priority ${found.priority} ${found.text} is asked for answers of ${endpoint.address} before weir’s rules`;
    return [found.isPartial ? check.warn(`${what}, for some packets`, mend) : check.fail(what, mend)];
  }
  return [check.ok(before.length === 0 ? 'there are no others' : `${before.length} others, none in the way`)];
}

/**
 * The first that may send clients' packets for a VIP anywhere. One that has all of them looked up in main, where weir's route is, ends
 * the search; one for what backends send is no concern of clients.
 */
function ruleForVip(
  rules: readonly ForeignRule[],
  { routes }: NetworkFacts,
  endpoints: readonly ReturnEndpoint[],
  word: number,
): ForeignRule | undefined {
  for (const rule of rules) {
    const { from, to, iif, table, isPartial } = rule;
    if ((to !== null && !holds(to, word)) || iif === 'lo') continue;
    if (table === MAIN_TABLE) {
      if (from === null && iif === null && !isPartial) return undefined;
      continue;
    }
    if (from !== null && endpoints.some(({ address }) => holds(from, parsePrefix(address).address))) continue;
    const leads = routes.some((route) => route.table === table && route.refusal !== 'throw' && holds(route.to, word));
    if (leads || table === 0) return from === null ? rule : { ...rule, isPartial: true };
  }
  return undefined;
}

function ruleForAnswers(
  rules: readonly ForeignRule[],
  facts: NetworkFacts,
  endpoint: ReturnEndpoint,
): ForeignRule | undefined {
  const word = parsePrefix(endpoint.address).address;
  const dev = facts.kernel.hops.get(endpoint.address)?.dev;
  return rules.find(({ priority, from, to, iif, table }) => {
    if (priority >= RETURN_PRIORITY || (from !== null && !holds(from, word)) || (iif !== null && iif !== dev))
      return false;
    // Where clients are is not known; what is meant for a part of the world is no trouble to all.
    return (to === null || to.length === 0) && (table === 0 || facts.routes.some((route) => route.table === table));
  });
}

function checkFirewall(config: Config, { firewall, firewallProblem }: NetworkFacts): Finding[] {
  const forward = new Check(
    'forward-policy',
    'the kernel forwards what goes into weir’s device and what comes out of it',
  );
  const nat = new Check('nat', 'a VIP that the kernel translates never reaches weir');
  const invalid = new Check(
    'invalid',
    'in mode dsr the kernel sees one direction only, and takes connections for invalid',
  );
  if (firewall === null) return [forward.skip(firewallProblem), nat.skip(firewallProblem)];
  const findings = [checkForward(forward, config, firewall), checkNat(nat, config, firewall)];
  if (usesTunnel(config) || config.role === 'node') findings.push(checkInvalid(invalid, config, firewall));
  return findings;
}

function checkForward(check: Check, { device: { name } }: Config, firewall: Firewall): Finding {
  const sides = (['iif', 'oif'] as const).map((side) => ({ side, ...passageThrough(firewall, name, side) }));
  const accept = ({ side, chain }: { side: string; chain: Chain | null }): string =>
    `nft insert rule ${chain!.place} ${side}name '"${name}"' accept`;
  const refused = sides.filter(({ passage }) => passage === 'refused');
  const unknown = sides.filter(({ passage }) => passage === 'unknown');
  const place = (refused[0] ?? unknown[0])?.chain?.place;
  if (refused.length > 0) {
    return check.fail(`chain ${place} refuses packets of ${name}`, [...refused, ...unknown].map(accept).join(' && '));
  }
  if (unknown.length > 0) {
    return check.warn(
      `whether chain ${place} lets packets of ${name} pass depends on their addresses`,
      unknown.map(accept).join(' && '),
    );
  }
  if (firewall.legacyTables !== '') {
    return check.warn(
      `packets pass as far as nftables goes; rules of iptables-legacy (${firewall.legacyTables}) were not seen`,
      null,
    );
  }
  return check.ok(`chains of the forward hook let packets of ${name} pass`);
}

function checkNat(check: Check, config: Config, firewall: Firewall): Finding {
  for (const { address, port } of config.role === 'node' ? [] : config.services) {
    for (const chain of firewall.chains) {
      const rule = chain.rules.find((each) => each.daddr !== null && takes(each, address.word, port));
      if (rule === undefined) continue;
      return check.fail(
        `a rule of chain ${chain.place} translates ${address.text}:${port} or drops it`,
        `nft delete rule ${chain.place} handle ${rule.handle}`,
      );
    }
  }
  return check.ok('no rule translates or drops what is for a VIP');
}

function takes(rule: FirewallRule, word: number, port: number): boolean {
  const isTaken = rule.verdict === 'dnat' || (rule.verdict === 'drop' && !rule.isPartial && rule.states === null);
  return isTaken && meetsAddress(rule.daddr, word) && meetsPort(rule.dport, port);
}

const INVALID_HOOKS = ['forward', 'prerouting', 'input', 'output', 'postrouting'];

function checkInvalid(check: Check, { device: { name } }: Config, firewall: Firewall): Finding {
  for (const chain of firewall.chains) {
    if (chain.hook === null || !INVALID_HOOKS.includes(chain.hook)) continue;
    const at = chain.rules.findIndex(
      ({ verdict, states }) => verdict === 'drop' && states?.includes('invalid') === true,
    );
    if (at < 0) continue;
    const side = chain.hook === 'output' || chain.hook === 'postrouting' ? 'oif' : 'iif';
    const isSpared = chain.rules
      .slice(0, at)
      .some((rule) => rule.verdict === 'accept' && rule.states === null && rule[side]?.values.includes(name));
    if (isSpared) continue;
    const sides = chain.hook === 'forward' ? ['iifname', 'oifname'] : [`${side}name`];
    const mend = sides.map((each) => `nft insert rule ${chain.place} ${each} '"${name}"' accept`).join(' && ');
    return check.fail(`chain ${chain.place} drops what is in state invalid`, mend);
  }
  return check.ok('nothing drops state invalid');
}

function checkKernelConntrack({ kernelConntrack }: NetworkFacts): Finding[] {
  const check = new Check(
    'kernel-conntrack',
    'where nf_conntrack runs, the kernel drops new connections when its own table is full',
  );
  if (kernelConntrack === null) return [check.ok('not in use here')];
  const { count, max } = kernelConntrack;
  const found = `${count} of ${max} entries`;
  if (max === 0 || count < max * 0.8) return [check.ok(found)];
  return [check.warn(found, `sysctl -w net.netfilter.nf_conntrack_max=${max * 4}`)];
}
