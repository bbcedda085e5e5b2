/** IPv4 addresses between text and the one 32-bit word the data path knows. Words may be signed or unsigned. */

/** The unsigned word of a canonical dotted quad. The text is known to be valid (the config schema checks with net.isIP). */
export function parseIpv4(text: string): number {
  let word = 0;
  for (const part of text.split('.')) word = (word << 8) | Number(part);
  return word >>> 0;
}

/** The dotted quad of a word. */
export function formatIpv4(word: number): string {
  return `${word >>> 24}.${(word >>> 16) & 255}.${(word >>> 8) & 255}.${word & 255}`;
}

/** `a.b.c.d:port`, as lists and logs print an endpoint. */
export function formatEndpoint(address: number, port: number): string {
  return `${formatIpv4(address)}:${port}`;
}

/** Whether a source address is one host that may be answered (RFC 1122 3.2.2): not 0/8, 127/8, multicast or class E. */
export function isOneHost(address: number): boolean {
  const first = address >>> 24;
  return first !== 0 && first !== 127 && first < 224;
}
