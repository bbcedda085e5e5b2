/**
 * A colour and a dash for each service and backend, by its identity: the same in every chart and table, and after a reload of the page. Eight
 * colours that are told apart by people who see colours in any of the common ways, then the same dashed, then dotted.
 */
export interface Look {
  /** Of the custom properties --line-0 to --line-7 of style.css. */
  readonly colour: number;
  readonly dash: readonly number[];
}

const COLOURS = 8;

const DASHES: readonly (readonly number[])[] = [[], [8, 4], [2, 4]];

export class Looks {
  readonly #places = new Map<string, number>();
  readonly #taken = new Set<number>();

  /** Gives places to those who have none yet: by their identities alone, as long as these are the same. */
  assign(identities: readonly string[]): void {
    for (const identity of identities.filter((each) => !this.#places.has(each)).sort()) {
      let place = hash(identity) % COLOURS;
      for (let tries = 0; this.#taken.has(place); tries++) place = tries < COLOURS ? nextColour(place) : place + 1;
      this.#taken.add(place);
      this.#places.set(identity, place);
    }
  }

  of(identity: string): Look {
    const place = this.#places.get(identity) ?? 0;
    return { colour: place % COLOURS, dash: DASHES[Math.floor(place / COLOURS) % DASHES.length]! };
  }
}

function nextColour(place: number): number {
  return place - (place % COLOURS) + ((place + 1) % COLOURS);
}

/** FNV-1a. */
function hash(text: string): number {
  let value = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 0x01000193) >>> 0;
  return value;
}

/** What a colour of style.css is in the theme in use, for a canvas. */
export function resolveColour(property: string): string {
  probe ??= document.body.appendChild(document.createElement('i'));
  probe.hidden = true;
  probe.style.color = `var(${property})`;
  return getComputedStyle(probe).color;
}

let probe: HTMLElement | undefined;
