import type { AddressRange } from '../config/config.js';
import { affinitySeconds, type KernelService, MASQUERADE_MARK, quoted, summary } from './kernel-view.js';

/*
 *   nat     PREROUTING, OUTPUT -> WEIR-SERVICES -> [WEIR-FW-hash ->] WEIR-SVC-hash -> WEIR-SEP-hash -> DNAT
 *                                 who is asked     its sourceRanges   the lot         one backend
 *           POSTROUTING -> WEIR-POSTROUTING -> MASQUERADE               what WEIR-MARK-MASQ has marked
 *
 *   filter  INPUT, FORWARD, OUTPUT -> WEIR-SERVICES -> REJECT or DROP   what nat has left: a VIP is still its destination
 *
 * Only the first packet of a connection comes by the rules of nat; the kernel's conntrack translates the others. filter looks at what begins
 * (ctstate NEW), too.
 */

/** XT_MAX_COMMENT_LEN, with its zero. */
const MAX_COMMENT = 255;

/** The text for `iptables-restore --noflush`. */
export function toIptables(services: readonly KernelService[]): string {
  return [
    '# Made by `weir export iptables`. Load: iptables-restore --noflush FILE',
    '# Unload: iptables-save | grep -v WEIR- | iptables-restore',
    ...natTable(services),
    ...filterTable(services),
    '',
  ].join('\n');
}

function natTable(services: readonly KernelService[]): string[] {
  const served = services.filter(({ backends }) => backends.length > 0);
  return [
    '*nat',
    ...['WEIR-SERVICES', 'WEIR-POSTROUTING', 'WEIR-MARK-MASQ', ...served.flatMap(chainsOf)].map(declare),
    ...['PREROUTING', 'OUTPUT'].map((hook) => `-A ${hook}${comment('weir services')} -j WEIR-SERVICES`),
    `-A POSTROUTING${comment('weir masquerading')} -j WEIR-POSTROUTING`,
    `-A WEIR-POSTROUTING -m mark ! --mark ${MASQUERADE_MARK}/${MASQUERADE_MARK} -j RETURN`,
    `-A WEIR-POSTROUTING -j MARK --xor-mark ${MASQUERADE_MARK}`,
    `-A WEIR-POSTROUTING${comment('weir: what was marked')} -j MASQUERADE --random-fully`,
    `-A WEIR-MARK-MASQ -j MARK --or-mark ${MASQUERADE_MARK}`,
    ...served.map(
      (service) => `-A WEIR-SERVICES ${destination(service)}${comment(service.config.name)} -j ${entryOf(service)}`,
    ),
    ...served.flatMap((service) => [`# ${summary(service)}`, ...sourceRules(service), ...serviceRules(service)]),
    'COMMIT',
  ];
}

function chainsOf(service: KernelService): string[] {
  const entry = hasSources(service) ? [entryOf(service)] : [];
  return [...entry, lotOf(service), ...service.backends.map(({ hash }) => `WEIR-SEP-${hash}`)];
}

function sourceRules(service: KernelService): string[] {
  if (!hasSources(service)) return [];
  const { name, sourceRanges } = service.config;
  return distinct(sourceRanges).map(
    (range) => `-A ${entryOf(service)} -s ${range}${comment(`${name}: sourceRanges`)} -j ${lotOf(service)}`,
  );
}

function serviceRules(service: KernelService): string[] {
  const { config, backends } = service;
  const { name, protocol, mode, affinityMs } = config;
  const lot = `-A ${lotOf(service)}`;
  const rules: string[] = [];
  if (mode === 'snat') rules.push(`${lot}${comment(`${name}: snat`)} -j WEIR-MARK-MASQ`);
  const titles = backends.map(({ config }) => comment(`${name} -> ${config.name}`));
  if (affinityMs > 0) {
    const known = `--rcheck --seconds ${affinitySeconds(config)} --reap`;
    backends.forEach(({ hash }, i) => {
      rules.push(`${lot}${titles[i]} -m recent --name WEIR-SEP-${hash} ${known} -j WEIR-SEP-${hash}`);
    });
  }
  backends.forEach(({ hash, probability }, i) => {
    const chance = probability === null ? '' : ` -m statistic --mode random --probability ${probability}`;
    rules.push(`${lot}${titles[i]}${chance} -j WEIR-SEP-${hash}`);
  });
  backends.forEach(({ hash, config: { name: backend, address, port } }) => {
    const title = `${name}/${backend}`;
    const remember = affinityMs > 0 ? ` -m recent --name WEIR-SEP-${hash} --set` : '';
    rules.push(
      `-A WEIR-SEP-${hash} -s ${address.text}/32${comment(`${title}: hairpin`)} -j WEIR-MARK-MASQ`,
      `-A WEIR-SEP-${hash} -p ${protocol}${comment(title)}${remember} -m ${protocol} -j DNAT --to-destination ${address.text}:${port}`,
    );
  });
  return rules;
}

/** Rules for all that has not been translated, though its destination is a VIP: rule 1 of weir's own. */
function filterTable(services: readonly KernelService[]): string[] {
  const vips = [...new Set(services.map(({ config }) => config.address.text))];
  const refuse = (service: KernelService, why: string, isDropped: boolean): string => {
    const target = isDropped ? 'DROP' : rejectWith(service.config.protocol);
    return `-A WEIR-SERVICES ${destination(service)}${comment(`${service.config.name}: ${why}`)} -j ${target}`;
  };
  return [
    '*filter',
    declare('WEIR-SERVICES'),
    ...['INPUT', 'FORWARD', 'OUTPUT'].map(
      (hook) => `-A ${hook} -m conntrack --ctstate NEW${comment('weir refusals')} -j WEIR-SERVICES`,
    ),
    ...services.flatMap((service) => [
      // Who may not connect is not told that nobody would answer.
      ...(hasSources(service) && service.backends.length === 0
        ? distinct(service.config.sourceRanges).map((range) =>
            refuse(service, 'no backend', service.config.noBackend === 'drop').replace(' -d ', ` -s ${range} -d `),
          )
        : []),
      ...(hasSources(service) ? [refuse(service, 'not in sourceRanges', true)] : []),
      ...(!hasSources(service) && service.backends.length === 0
        ? [refuse(service, 'no backend', service.config.noBackend === 'drop')]
        : []),
    ]),
    ...vips.flatMap((vip) =>
      (['tcp', 'udp'] as const).map(
        (protocol) =>
          `-A WEIR-SERVICES -d ${vip}/32 -p ${protocol}${comment(`${vip}: unknown port`)} -j ${rejectWith(protocol)}`,
      ),
    ),
    'COMMIT',
  ];
}

function rejectWith(protocol: 'tcp' | 'udp'): string {
  return `REJECT --reject-with ${protocol === 'tcp' ? 'tcp-reset' : 'icmp-port-unreachable'}`;
}

function destination({ config: { address, port, protocol } }: KernelService): string {
  return `-d ${address.text}/32 -p ${protocol} -m ${protocol} --dport ${port}`;
}

function hasSources({ config }: KernelService): boolean {
  return config.sourceRanges.length > 0;
}

function entryOf(service: KernelService): string {
  return hasSources(service) ? `WEIR-FW-${service.hash}` : lotOf(service);
}

function lotOf({ hash }: KernelService): string {
  return `WEIR-SVC-${hash}`;
}

function declare(name: string): string {
  return `:${name} - [0:0]`;
}

function comment(text: string): string {
  return ` -m comment --comment ${quoted(text, MAX_COMMENT)}`;
}

function distinct(ranges: readonly AddressRange[]): string[] {
  return [...new Set(ranges.map(({ text }) => text))];
}
