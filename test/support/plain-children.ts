/**
 * Programs that a test starts run as they do for a user. The test runner puts its loaders into NODE_OPTIONS, which every Node.js below
 * it would load again, a second each: weir started in five times its time.
 */
delete process.env.NODE_OPTIONS;
