// Three steps for who is here for the first time. They go away once all are done, and come back when asked for.

import { element } from "./elements.js";

const KEPT = "lisarec.playground.steps"; // in the browser
const STEPS = ["choose", "follow", "explain"];

export class FirstSteps {
  #done = kept();

  constructor() {
    element("show-start").addEventListener("click", () => {
      const isWanted = element("start").hidden;
      this.#done = new Set(isWanted ? [] : STEPS);
      this.#keep();
      this.show();
    });
    this.show();
  }

  /** The visitor has chosen an item. */
  chose() {
    this.#finish(this.#done.has("choose") ? "follow" : "choose");
  }

  /** The visitor has read why an item is recommended, which says most about a list of their own. */
  explained() {
    if (this.#done.has("choose")) this.#finish("explain");
  }

  /** Show what is done. Steps that are all done go away here, and not where the list would move under a pointer. */
  show() {
    const isOver = this.#done.size === STEPS.length;
    element("start").hidden = isOver;
    element("show-start").ariaExpanded = String(!isOver);
    element("show-start").textContent = isOver ? "First steps" : "Hide first steps";
    this.#mark();
  }

  #finish(step) {
    if (this.#done.has(step)) return;
    this.#done.add(step);
    this.#keep();
    this.#mark();
  }

  #mark() {
    for (const step of STEPS) {
      const row = element(`step-${step}`);
      row.classList.toggle("done", this.#done.has(step));
      row.querySelector(".unseen").hidden = !this.#done.has(step);
    }
  }

  #keep() {
    localStorage.setItem(KEPT, JSON.stringify([...this.#done]));
  }
}

/** The steps that were done before; none where what the browser has kept is not to be read. */
function kept() {
  try {
    return new Set(JSON.parse(localStorage.getItem(KEPT)).filter((step) => STEPS.includes(step)));
  } catch {
    return new Set();
  }
}
