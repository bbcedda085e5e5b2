import { WeirError } from '../../base/errors.js';
import { formatIpv4 } from '../../wire/address.js';
import type { Ends } from '../iproute.js';
import { arrivalSteps } from './arrival.js';
import { type KnownCase, openCase } from './case.js';
import { Rehearsal } from './dry-run.js';
import type { ExplainView, OutcomeView, SentView } from './explain-view.js';
import { outcomesOf } from './outcomes.js';
import { headersOf, packetView } from './packet-summary.js';
import { type ExplainQuery, packetOf } from './request.js';
import { assume, type Scene } from './scene.js';

/**
 * What weir would do with a packet that nobody has sent, and why.
 *
 *     query --> packet --+--> dry run of the pipeline itself -----------> verdict, reason, backend, bytes
 *     scene -------------+--> the same tables, by the same functions ---> steps: what each stage found
 *
 * The dry run is the authority (dry-run.ts): nothing here concludes what a packet's end is. Steps say what was found on the way, from
 * the snapshot, from what the data path has been asked for, and from what the dry run looked up in the table; which of them there are
 * follows from how it went. Where lots decide, each backend's is drawn in turn.
 *
 * It is true of the moment of the question: packets that come after may make or end connections, use up ports and limits. Left out is
 * the identification that a first fragment leaves with where another datagram has its own already.
 */

/** @throws WeirError USAGE; NOT_SUPPORTED at a node */
export async function explain(query: ExplainQuery, given: Scene, file: ExplainView['config']): Promise<ExplainView> {
  if (given.desired.config.role === 'node') {
    throw new WeirError(
      'NOT_SUPPORTED',
      'a node decides nothing that could be explained: what comes through its tunnels goes to the backend that the gateway chose',
      'Ask the gateway; `weir replay` runs a capture through a node.',
    );
  }
  const scene = assume(given, query.without ?? [], query.assumeDown ?? []);
  const packet = packetOf(query, scene);
  const open = openCase(scene, packet);
  const known: KnownCase = { ...open, recollection: await scene.recall(open.query) };
  const rehearsal = new Rehearsal(scene, packet, known.query, known.recollection);
  const first = rehearsal.run();
  const { outcomes, untried } = outcomesOf(known, rehearsal, first);
  return {
    config: file,
    assumed: [
      ...[...scene.assumed.without.values()].map((name) => `${name} is not in the file`),
      ...[...scene.assumed.down.values()].map((name) => `the check of ${name} fails`),
    ],
    packet: packetView(packet),
    steps: arrivalSteps(known, first),
    outcomes: await withRoutes(outcomes, scene),
    untried,
  };
}

async function withRoutes(outcomes: readonly OutcomeView[], scene: Scene): Promise<OutcomeView[]> {
  const endsOf = ({ bytes }: SentView): Ends => {
    const { source, destination } = headersOf(Buffer.from(bytes, 'hex'));
    return { source: formatIpv4(source), destination: formatIpv4(destination) };
  };
  const keyOf = ({ source, destination }: Ends): string => `${source} ${destination}`;
  const asked = new Map(outcomes.flatMap(({ out }) => out.map(endsOf)).map((ends) => [keyOf(ends), ends]));
  const answers = await scene.routes([...asked.values()]);
  const routes = new Map([...asked.keys()].map((key, i) => [key, answers[i] ?? null]));
  return outcomes.map((outcome) => ({
    ...outcome,
    out: outcome.out.map((sent) => ({ ...sent, route: routes.get(keyOf(endsOf(sent))) ?? null })),
  }));
}
