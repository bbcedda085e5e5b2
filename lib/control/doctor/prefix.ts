import { parseIpv4 } from '../../wire/address.js';

/** An address with the length of its network: `10.2.0.1/24`. */
export interface Prefix {
  readonly text: string;
  /** Unsigned, with the bits of the host. */
  readonly address: number;
  readonly length: number;
}

/** @param text with or without a length, as ip writes them: `10.2.0.0/24`, `10.2.0.11` */
export function parsePrefix(text: string): Prefix {
  const [address = '', length = '32'] = text.split('/');
  return { text, address: parseIpv4(address), length: Number(length) };
}

/** Whether an address, an unsigned word, is in the network. */
export function holds({ address, length }: Prefix, word: number): boolean {
  return length === 0 || (address ^ word) >>> (32 - length) === 0;
}
