/**
 * Puts the dashboard together in dist/web: each module of this folder as JavaScript, under its own name and no smaller than it is
 * written, since gzip does nearly as well and what a browser shows can be read; the page and its style as they are; uplot beside them.
 */
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import ts from 'typescript';

const from = new URL('./', import.meta.url);
const to = new URL('../dist/web/', import.meta.url);
const uplot = new URL('../node_modules/uplot/dist/', import.meta.url);

rmSync(to, { recursive: true, force: true });
mkdirSync(to, { recursive: true });
for (const name of readdirSync(from)) {
  if (name.endsWith('.ts')) writeFileSync(new URL(name.replace(/ts$/, 'js'), to), transpile(name));
  else if (/\.(html|css|svg)$/.test(name)) copyFileSync(new URL(name, from), new URL(name, to));
}
copyFileSync(new URL('uPlot.iife.min.js', uplot), new URL('uplot.js', to));

/** Types are checked by web/tsconfig.json. */
function transpile(name) {
  const { outputText } = ts.transpileModule(readFileSync(new URL(name, from), 'utf8'), {
    fileName: name,
    compilerOptions: {
      target: ts.ScriptTarget.ES2022,
      module: ts.ModuleKind.ESNext,
      moduleDetection: ts.ModuleDetectionKind.Legacy,
      verbatimModuleSyntax: true,
      removeComments: true,
    },
  });
  return outputText;
}
