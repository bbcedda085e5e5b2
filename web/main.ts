import type { LiveServiceView, LiveView } from '../lib/control/live/live-view.js';
import { Chart, type Charted } from './charts.js';
import { Looks } from './colours.js';
import { ConnectionsPanel } from './connections.js';
import { byId, make, setText } from './dom.js';
import { ExplainPanel } from './explain.js';
import { bits, duration, percent, si, whole } from './format.js';
import { backendKey, History, MEASURES, serviceKey } from './history.js';
import { ClientPanel, ConntrackPanel, Facts, ReasonPanel } from './panels.js';
import { ServiceTable } from './services.js';
import { type LinkState, Stream } from './stream.js';

/*
 *   /v1/live --one view a second--> show() --+--> history -> charts
 *                                            +--> tables and facts, in place
 *   /v1/ct, /v1/explain: when they are asked for
 */

const history = new History();
const looks = new Looks();
const charts = MEASURES.map((measure) => new Chart(measure, history));
byId('charts').append(...charts.map(({ element }) => element));
const scope = byId<HTMLSelectElement>('scope');
const facts = new Facts(byId('facts'));
const table = new ServiceTable(document.querySelector<HTMLTableElement>('table.services')!, looks, (key) => {
  scope.value = key;
  draw();
  byId('traffic').scrollIntoView();
  scope.focus({ preventScroll: true });
});
const explain = new ExplainPanel();
const connections = new ConnectionsPanel((flow) => explain.explainFlow(flow));
const conntrack = new ConntrackPanel();
const clients = new ClientPanel((address) => {
  connections.showClient(address);
  void connections.list();
});
const reasons = new ReasonPanel();
let latest: LiveView | undefined;
/** What the charts show: their lines are made anew when it changes. */
let charted = '';

function show(view: LiveView): void {
  latest = view;
  history.add(view);
  looks.assign(view.services.map(serviceKey));
  for (const service of view.services) {
    const key = serviceKey(service);
    looks.assign(service.backends.map((backend) => backendKey(key, backend)));
  }
  offerScopes(view.services);
  draw();
  table.show(view.services);
  const omitted = view.omittedServices;
  setText(byId('services-note'), omitted === 0 ? '' : `${whole(omitted)} more are not shown: weir services`);
  connections.setServices(view.services.map(({ name }) => name));
  conntrack.show(view);
  clients.show(view);
  reasons.show(view);
  const { version, device, uptimeSeconds, config } = view.status;
  setText(byId('who'), `${version} · ${device.name} · up ${duration(uptimeSeconds)}`);
  const { lastReload } = config;
  byId('notice').hidden = lastReload.success;
  if (!lastReload.success) setText(byId('notice'), `The file was refused and is not in use: ${lastReload.message}`);
}

function draw(): void {
  if (latest === undefined) return;
  const {
    services,
    rates,
    intervalSeconds,
    conntrack: { tables },
  } = latest;
  const lines = linesOf(services);
  const wanted = JSON.stringify(lines);
  if (wanted !== charted) for (const chart of charts) chart.setLines(lines);
  charted = wanted;
  const one = services.find((service) => serviceKey(service) === scope.value);
  const known = intervalSeconds > 0;
  const [packets, bitRate, opened] = charts as [Chart, Chart, Chart];
  if (one === undefined) {
    packets.update(known ? rates.packetsIn : null, `in, ${si(rates.packetsOut)} out`);
    bitRate.update(known ? rates.bitsIn : null, `in, ${bits(rates.bitsOut)} out`);
  } else {
    const { packets: p, bits: b } = one.rates;
    packets.update(known ? p.original + p.reply : null, `${si(p.original)} from clients, ${si(p.reply)} from backends`);
    bitRate.update(
      known ? b.original + b.reply : null,
      `${bits(b.original)} from clients, ${bits(b.reply)} from backends`,
    );
  }
  opened.update(known ? (one?.rates ?? rates).connections : null, one === undefined ? 'all services' : one.name);
  const backends = services.flatMap((service) => service.backends).filter(({ removed }) => !removed);
  const entries = tables.tcp.entries + tables.any.entries;
  facts.show([
    ['Connections', whole(entries)],
    ['Table fill', percent(Math.max(tables.tcp.entries / tables.tcp.limit, tables.any.entries / tables.any.limit))],
    ['Backends taking new', `${backends.filter(({ takesNew }) => takesNew).length} of ${backends.length}`],
    ['Dropped', known ? `${si(rates.drops)} /s` : '–'],
  ]);
}

/** Of all services, or of the backends of one. */
function linesOf(services: readonly LiveServiceView[]): Charted[] {
  const one = services.find((service) => serviceKey(service) === scope.value);
  if (one === undefined) {
    return services.map((service) => ({
      key: serviceKey(service),
      name: service.name,
      look: looks.of(serviceKey(service)),
    }));
  }
  return one.backends.map((backend) => {
    const key = backendKey(serviceKey(one), backend);
    return { key, name: backend.name, look: looks.of(key) };
  });
}

function offerScopes(services: readonly LiveServiceView[]): void {
  const wanted = services.map((service) => [serviceKey(service), `backends of ${service.name}`] as const);
  const shown = [...scope.options].slice(1).map(({ value, text }) => [value, text]);
  if (JSON.stringify(shown) === JSON.stringify(wanted)) return;
  const chosen = scope.value;
  const options = wanted.map(([value, text]) => make('option', { value }, text));
  scope.replaceChildren(make('option', { value: '' }, 'services'), ...options);
  scope.value = wanted.some(([key]) => key === chosen) ? chosen : '';
}

const LINK_TEXTS: Readonly<Record<LinkState, string>> = {
  connecting: 'Connecting',
  live: 'Live',
  lost: 'Disconnected, trying again',
  paused: 'Paused while hidden',
};

function showLink(state: LinkState): void {
  const link = byId('link');
  link.dataset.state = state;
  document.body.classList.toggle('stale', state === 'lost');
  setText(link.firstElementChild!, LINK_TEXTS[state]);
}

const THEMES = ['system', 'light', 'dark'] as const;

function showTheme(theme: string): void {
  if (theme === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId('theme'), `Theme: ${theme}`);
  charted = '';
  draw();
}

scope.addEventListener('change', draw);
byId('theme').addEventListener('click', () => {
  const now = document.documentElement.dataset.theme ?? 'system';
  const next = THEMES[((THEMES as readonly string[]).indexOf(now) + 1) % THEMES.length]!;
  localStorage.setItem('weir-theme', next);
  showTheme(next);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () =>
  showTheme(document.documentElement.dataset.theme ?? 'system'),
);
showTheme(document.documentElement.dataset.theme ?? 'system');
new Stream({ view: show, state: showLink });
void connections.list();
