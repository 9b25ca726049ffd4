// Elements of the page. Whatever a catalogue or a user may contain is put into them as text, never as markup.

export const element = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** What a visitor does to an item: where the main pointer is a finger, there is no click. */
export const press = matchMedia("(pointer: coarse)").matches ? "tap" : "click";

export const count = (number) => number.toLocaleString("en");

/** Names with their values, in a description list. */
export function describe(list, entries) {
  list.replaceChildren(...entries.map(([name, ...values]) => make("div", {}, make("dt", { textContent: name }), make("dd", {}, ...values))));
}
