import processOnSpawn from 'process-on-spawn';

/**
 * Programs that a test starts run as they do for a user. The test runner puts its loaders into NODE_OPTIONS of every child, whatever
 * the variable says here: each Node.js below would load them, two threads of its own for that included, and weir start in five times its time.
 */
delete process.env.NODE_OPTIONS;
processOnSpawn.addListener((child) => {
  const { NODE_OPTIONS: _, ...env } = child.env;
  child.env = env;
});
