/* A backend: says its name and the address that it sees as the client's. */
import { createServer } from 'node:http';

const name = process.env.NAME ?? 'backend';

const server = createServer((request, response) => {
  // So that each request is a connection, and may meet another backend.
  response.setHeader('connection', 'close');
  response.end(`${name} saw ${request.socket.remoteAddress}\n`);
});
server.listen(8080, '0.0.0.0', () => console.log(`${name} listens on port 8080`));

// As process 1 it has no default action for signals.
process.on('SIGTERM', () => process.exit(0));
