/** What this page needs of the DOM. All text goes in as text: no name of a service or backend is ever taken for markup. */

type Attributes = Readonly<Record<string, string | number | boolean | undefined>>;

type Child = Node | string;

/** An element with attributes (`true`: there without a value; `false` and undefined: not there) and children. */
export function make<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  attributes: Attributes = {},
  ...children: readonly Child[]
): HTMLElementTagNameMap[Tag] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children);
  return element;
}

/** The element of the page that has this id. */
export function byId<Type extends HTMLElement = HTMLElement>(id: string): Type {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`the page has no #${id}`);
  return element as Type;
}

/** Sets text where it is another: an unchanged one costs no layout and no reader's attention. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** An element that shows something which may change. */
export interface Shown<Item> {
  readonly element: HTMLElement;
  update(item: Item): void;
}

/**
 * Elements of a list, by keys: those that stay keep their place in the document, and with it focus and selection.
 *
 * @param key of items; no two have the same
 */
export class KeyedList<Item> {
  readonly #parent: Element;
  readonly #key: (item: Item) => string;
  readonly #create: (item: Item) => Shown<Item>;
  /** What stands there already, a table's head say, stays before the list. */
  readonly #head: Element | null;
  #shown = new Map<string, Shown<Item>>();

  constructor(parent: Element, key: (item: Item) => string, create: (item: Item) => Shown<Item>) {
    this.#parent = parent;
    this.#key = key;
    this.#create = create;
    this.#head = parent.lastElementChild;
  }

  show(items: readonly Item[]): void {
    const before = this.#shown;
    this.#shown = new Map();
    let last = this.#head;
    for (const item of items) {
      const key = this.#key(item);
      const shown = before.get(key) ?? this.#create(item);
      before.delete(key);
      this.#shown.set(key, shown);
      shown.update(item);
      const place: Element | null = last === null ? this.#parent.firstElementChild : last.nextElementSibling;
      if (shown.element !== place) this.#parent.insertBefore(shown.element, place);
      last = shown.element;
    }
    for (const { element } of before.values()) element.remove();
  }
}
