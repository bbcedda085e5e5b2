/** The part of the package that is used. It brings no types, and may not be installed. */
declare module 'raw-socket' {
  import type { EventEmitter } from 'node:events';

  /** Emits `message` (the one receive buffer, from the IP header on; the sender's address) and `error`. */
  export interface Socket extends EventEmitter {
    send(
      buffer: Buffer,
      offset: number,
      length: number,
      address: string,
      after: (error: Error | null, bytes: number) => void,
    ): void;
    close(): void;
  }

  const raw: { readonly Protocol: { readonly ICMP: number }; createSocket(options: { protocol: number }): Socket };
  export default raw;
}
