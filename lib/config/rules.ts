import type { Fault } from './faults.js';
import { configSchema } from './schema.js';
import { addressFault } from './text-forms.js';

/**
 * The rules between values. They look at the file as written and not at the schema's output, so that they are reported together
 * with what the schema finds; whatever the schema refuses they step over. One pass, linear in the size of the file.
 *
 * 1. Names are unique: services in the file, backends in their service.
 * 2. Identities are unique: VIP, port and protocol in the file; address and port in a service.
 * 3. An address has one role. A VIP never leaves weir as a destination, so it cannot be a backend, a node, an snat address or
 *    the end of the tunnel; an snat address is weir's own, so it cannot be a backend, a node or the end of the tunnel
 *    either; and a gateway does not tunnel to itself.
 * 4. A mode has what it needs: snat a pool, dsr and role node the tunnel's address, Maglev a table with room for each backend;
 *    and a backend is reached at a node other than itself in mode dsr only.
 */
export function checkRules(written: unknown): Fault[] {
  const file = new Rules(written);
  file.checkNeeds();
  file.checkServices();
  file.checkAddresses();
  return file.faults;
}

type Path = readonly PropertyKey[];
type Entries = Readonly<Record<string, unknown>>;

const DEFAULT_PROTOCOL = 'tcp';
const DEFAULT_TABLE_SIZE = configSchema.parse({}).maglev.tableSize;

class Rules {
  readonly faults: Fault[] = [];
  readonly #file: Entries;
  readonly #services: readonly unknown[];
  readonly #tunnelAddress: string | null;
  /** VIP -> index of the first service that has it. */
  readonly #vips = new Map<string, number>();

  constructor(written: unknown) {
    this.#file = entries(written);
    this.#services = items(this.#file.services);
    this.#tunnelAddress = address(entries(this.#file.tunnel).address);
    this.#services.forEach((service, i) => {
      const vip = address(entries(service).address);
      if (vip !== null && !this.#vips.has(vip)) this.#vips.set(vip, i);
    });
  }

  checkNeeds(): void {
    if (this.#file.role === 'node' && entries(this.#file.tunnel).address === undefined)
      this.#fault(['role'], 'needs `tunnel.address`: the address of this host that tunnels end at');
    if (this.#file.admin !== undefined && this.#file.conntrack !== undefined) {
      const { stateFile } = entries(this.#file.conntrack);
      if (stateFile !== undefined && stateFile === entries(this.#file.admin).socket)
        this.#fault(['conntrack', 'stateFile'], 'is also `admin.socket`');
    }
  }

  checkServices(): void {
    const names = new Map<string, number>();
    const identities = new Map<string, number>();
    this.#services.forEach((service, i) => {
      const { name, address: vipText, port, protocol = DEFAULT_PROTOCOL, backends } = entries(service);
      const path = ['services', i];
      if (typeof name === 'string') {
        const earlier = claim(names, name, i);
        if (earlier !== null) this.#fault([...path, 'name'], `is already the name of services[${earlier}]`);
      }
      const vip = address(vipText);
      if (vip !== null && Number.isInteger(port) && typeof protocol === 'string') {
        const earlier = claim(identities, `${vip}:${port}/${protocol}`, i);
        if (earlier !== null)
          this.#fault([...path, 'address'], `makes ${vip}:${port}/${protocol}, which is already services[${earlier}]`);
      }
      this.#checkMode(entries(service), path);
      this.#checkBackends(items(backends), [...path, 'backends']);
    });
  }

  checkAddresses(): void {
    const snatAddresses = new Map<string, number>();
    items(entries(this.#file.snat).addresses).forEach((item, i) => {
      const text = address(item);
      if (text === null) return;
      const path = ['snat', 'addresses', i];
      const earlier = claim(snatAddresses, text, i);
      if (earlier !== null) this.#fault(path, `is already snat.addresses[${earlier}]`);
      this.#refuseVip(path, text);
      if (text === this.#tunnelAddress)
        this.#fault(path, 'is also `tunnel.address`; replies to it would be taken for tunnels');
    });
    if (this.#tunnelAddress !== null) this.#refuseVip(['tunnel', 'address'], this.#tunnelAddress);
    this.#services.forEach((service, i) => {
      const { mode, backends } = entries(service);
      items(backends).forEach((backend, j) => {
        this.#checkBackendAddresses(['services', i, 'backends', j], entries(backend), mode === 'dsr', snatAddresses);
      });
    });
  }

  #checkMode(service: Entries, path: Path): void {
    const { mode, algorithm, backends } = service;
    if (mode === 'snat' && isEmpty(entries(this.#file.snat).addresses))
      this.#fault([...path, 'mode'], 'needs `snat.addresses`, the source addresses that backends see');
    if (mode === 'dsr' && entries(this.#file.tunnel).address === undefined)
      this.#fault([...path, 'mode'], 'needs `tunnel.address`, this host’s end of the tunnel');
    const { tableSize = DEFAULT_TABLE_SIZE } = entries(this.#file.maglev);
    if (algorithm !== 'random' && typeof tableSize === 'number' && items(backends).length > tableSize)
      this.#fault(
        [...path, 'backends'],
        `are ${items(backends).length}, more than \`maglev.tableSize\` (${tableSize}) has entries`,
      );
    if (mode === 'dsr') return;
    items(backends).forEach((backend, j) => {
      const { node, address: own } = entries(backend);
      if (node !== undefined && node !== own)
        this.#fault(
          [...path, 'backends', j, 'node'],
          'is for services of mode dsr; of another mode, it is the backend’s address',
        );
    });
  }

  #checkBackends(backends: readonly unknown[], path: Path): void {
    const names = new Map<string, number>();
    const identities = new Map<string, number>();
    backends.forEach((backend, j) => {
      const { address: text, port, name } = entries(backend);
      const known = address(text);
      const endpoint = known !== null && Number.isInteger(port) ? `${known}:${port}` : null;
      const twin = endpoint === null ? null : claim(identities, endpoint, j);
      if (twin !== null) this.#fault([...path, j, 'address'], `makes ${endpoint}, which is already backends[${twin}]`);
      const effective = name === undefined ? endpoint : name;
      if (typeof effective !== 'string') return;
      const namesake = claim(names, effective, j);
      // Two nameless twins are one mistake.
      if (namesake === null || (twin !== null && name === undefined)) return;
      this.#fault([...path, j, 'name'], `is already the name of backends[${namesake}]`);
    });
  }

  #checkBackendAddresses(
    path: Path,
    backend: Entries,
    isDsr: boolean,
    snatAddresses: ReadonlyMap<string, number>,
  ): void {
    const text = address(backend.address);
    if (text !== null) {
      this.#refuseVip([...path, 'address'], text);
      this.#refuseSnat([...path, 'address'], text, snatAddresses);
    }
    if (!isDsr) return;
    const node = backend.node === undefined ? text : address(backend.node);
    const nodePath = [...path, backend.node === undefined ? 'address' : 'node'];
    if (node === null) return;
    if (backend.node !== undefined) {
      this.#refuseVip(nodePath, node);
      this.#refuseSnat(nodePath, node, snatAddresses);
    }
    if (node === this.#tunnelAddress && this.#file.role !== 'node')
      this.#fault(nodePath, 'is also `tunnel.address`; a gateway cannot tunnel to itself');
  }

  #refuseVip(path: Path, text: string): void {
    const service = this.#vips.get(text);
    if (service !== undefined) this.#fault(path, `is also the VIP of services[${service}]`);
  }

  #refuseSnat(path: Path, text: string, snatAddresses: ReadonlyMap<string, number>): void {
    const snat = snatAddresses.get(text);
    if (snat !== undefined) this.#fault(path, `is also snat.addresses[${snat}]`);
  }

  #fault(path: Path, message: string): void {
    this.faults.push({ path, message });
  }
}

/** Gives `key` to `index`, unless an earlier one has it: then returns that one. */
function claim(claims: Map<string, number>, key: string, index: number): number | null {
  const earlier = claims.get(key);
  if (earlier !== undefined) return earlier;
  claims.set(key, index);
  return null;
}

function address(value: unknown): string | null {
  return typeof value === 'string' && addressFault(value) === null ? value : null;
}

function entries(value: unknown): Entries {
  return typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Entries) : {};
}

function items(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

/** Absent, or a list of nothing; of any other shape the schema speaks. */
function isEmpty(value: unknown): boolean {
  return value === undefined || (Array.isArray(value) && value.length === 0);
}
