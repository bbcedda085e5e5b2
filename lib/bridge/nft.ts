import { mergeRanges } from '../balance/ranges.js';
import { formatIpv4 } from '../wire/address.js';
import { affinitySeconds, type KernelService, MASQUERADE_MARK, quoted, summary } from './kernel-view.js';

/*
 *   prerouting, output (nat)          map services: VIP . protocol . port -> goto service-hash -> goto backend-hash -> dnat
 *   postrouting (nat)                 masquerade what is marked
 *   input, forward, output (filter)   map no-backends, set vips: refuse what nat has left
 *
 * The whole file is one transaction: whoever loads it again replaces the table, and no packet meets half of it. The first lines see to it
 * that there is a table to delete.
 */

/** NFTNL_UDATA_COMMENT_MAXLEN. */
const MAX_COMMENT = 128;

/** Clients that an affinity remembers for one backend. */
const AFFINITY_CLIENTS = 65535;

const KEY = 'ip daddr . meta l4proto . th dport';

/** The text for `nft -f`. */
export function toNft(services: readonly KernelService[]): string {
  const served = services.filter(({ backends }) => backends.length > 0);
  const unserved = services.filter(({ backends }) => backends.length === 0);
  const vips = [...new Set(services.map(({ config }) => config.address.text))];
  const blocks = [
    ...served.flatMap((service) => [...sourceSets(service), ...backendBlocks(service), serviceChain(service)]),
    // Whose service has no backend is told so, unless it may not connect at all.
    ...unserved.flatMap((service) => [...sourceSets(service), refusalChain(service)]),
    verdictMap(
      'services',
      served.map((service) => `${keyOf(service)} : goto service-${service.hash}`),
    ),
    verdictMap(
      'no-backends',
      unserved.map((service) => `${keyOf(service)} : goto refuse-${service.hash}`),
    ),
    block('set vips', ['type ipv4_addr', ...elements(vips)]),
    block('chain say-refused', ['meta l4proto tcp reject with tcp reset', 'reject with icmp type port-unreachable']),
    block('chain refuse-new', [
      // The end of a rule's effect on them: a flow that nat has translated has another destination by now.
      `ct state new ${KEY} vmap @no-backends`,
      'ct state new ip daddr @vips meta l4proto { tcp, udp } goto say-refused',
    ]),
    ...(['prerouting', 'output'] as const).map((hook) =>
      block(`chain nat-${hook}`, [`type nat hook ${hook} priority -100; policy accept;`, `${KEY} vmap @services`]),
    ),
    block('chain nat-postrouting', [
      'type nat hook postrouting priority 100; policy accept;',
      `meta mark & ${MASQUERADE_MARK} == 0 return`,
      `meta mark set meta mark ^ ${MASQUERADE_MARK}`,
      'masquerade fully-random',
    ]),
    ...(['input', 'forward', 'output'] as const).map((hook) =>
      block(`chain filter-${hook}`, [`type filter hook ${hook} priority 0; policy accept;`, 'jump refuse-new']),
    ),
  ];
  return `# Made by \`weir export nft\`. Load, or load again: nft -f FILE
# Unload: nft delete table ip weir
add table ip weir
delete table ip weir
table ip weir {
${blocks.join('\n\n')}
}
`;
}

function serviceChain(service: KernelService): string {
  const { config, hash, backends } = service;
  const lines = [`# ${summary(service)}`];
  if (config.sourceRanges.length > 0) lines.push(`ip saddr != @sources-${hash} drop`);
  if (config.mode === 'snat') lines.push(mark(''));
  if (config.affinityMs > 0)
    lines.push(...backends.map(({ hash }) => `ip saddr @clients-${hash} goto backend-${hash}`));
  if (backends.length === 1) lines.push(`goto backend-${backends[0]!.hash}`);
  else {
    const choices = backends.map(({ hash, tickets: { first, last } }) => {
      const numbers = first === last ? `${first}` : `${first}-${last}`;
      return `\t\t${numbers} : goto backend-${hash},`;
    });
    const total = backends.at(-1)!.tickets.last + 1;
    lines.push(`numgen random mod ${total} vmap {`, ...choices, '}');
  }
  return block(`chain service-${hash}`, lines);
}

function backendBlocks({ config: service, backends }: KernelService): string[] {
  return backends.flatMap(({ hash, config: { name, address, port } }) => {
    const title = ` comment ${quoted(`${service.name}/${name}`, MAX_COMMENT)}`;
    const lines = [mark(`ip saddr ${address.text} `)];
    const clients: string[] = [];
    if (service.affinityMs > 0) {
      const rows = ['type ipv4_addr', 'flags dynamic, timeout', `timeout ${affinitySeconds(service)}s`];
      clients.push(block(`set clients-${hash}`, [...rows, `size ${AFFINITY_CLIENTS}`]));
      lines.push(`update @clients-${hash} { ip saddr }`);
    }
    lines.push(`meta l4proto ${service.protocol} dnat to ${address.text}:${port}${title}`);
    return [...clients, block(`chain backend-${hash}`, lines)];
  });
}

function refusalChain(service: KernelService): string {
  const { sourceRanges, noBackend } = service.config;
  return block(`chain refuse-${service.hash}`, [
    `# ${summary(service)}`,
    ...(sourceRanges.length > 0 ? [`ip saddr != @sources-${service.hash} drop`] : []),
    noBackend === 'drop' ? 'drop' : 'goto say-refused',
  ]);
}

function sourceSets({ config, hash }: KernelService): string[] {
  if (config.sourceRanges.length === 0) return [];
  const spans = mergeRanges(config.sourceRanges).map(({ first, last }) =>
    first === last ? formatIpv4(first) : `${formatIpv4(first)}-${formatIpv4(last)}`,
  );
  return [block(`set sources-${hash}`, ['type ipv4_addr', 'flags interval', ...elements(spans)])];
}

function verdictMap(name: string, members: readonly string[]): string {
  return block(`map ${name}`, ['type ipv4_addr . inet_proto . inet_service : verdict', ...elements(members)]);
}

function keyOf({ config: { address, protocol, port } }: KernelService): string {
  return `${address.text} . ${protocol} . ${port}`;
}

function mark(condition: string): string {
  return `${condition}meta mark set meta mark | ${MASQUERADE_MARK}`;
}

/** A list of none is no list to nft. */
function elements(members: readonly string[]): string[] {
  if (members.length === 0) return [];
  return ['elements = {', ...members.map((member) => `\t\t${member},`), '}'];
}

function block(head: string, lines: readonly string[]): string {
  return [`\t${head} {`, ...lines.map((line) => (line.startsWith('\t') ? `\t${line}` : `\t\t${line}`)), '\t}'].join(
    '\n',
  );
}
