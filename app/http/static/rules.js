// The rules of a list: what may be shown and what gains how much, as whoever sends requests writes them.

import { element, make } from "./elements.js";
import { call, hasKey } from "./service.js";

const OF_ITEMS = ["title", "categories", "available_from", "available_until", "published_at"]; // of every tenant
const STARTED = /\b(item|current|user)\.(\w*)$/; // a name of which the beginning stands before the caret
const AT_CHARACTER = /^at character (\d+): /;

/** A word of a shell that stands for exactly this text. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export class Rules {
  #form;
  #completions = element("completions");
  #names = null; // of properties, once somebody writes an expression

  /** `apply` shows the list anew. */
  constructor(form, apply) {
    this.#form = form;
    form.addEventListener("submit", (submit) => {
      submit.preventDefault();
      this.#completions.replaceChildren();
      apply();
    });
    for (const field of this.#fields) {
      field.setAttribute("aria-describedby", this.#faultOf(field).id);
      if (!field.matches(".expression")) continue;
      field.addEventListener("input", () => this.#complete(field));
      field.addEventListener("keydown", (press) => this.#enterCompletions(press));
    }
    element("scenario").addEventListener("focus", listScenarios, { once: true });
    this.#completions.addEventListener("keydown", (press) => this.#walk(press));
  }

  get #fields() {
    return [...this.#form.querySelectorAll("input[name]")];
  }

  #faultOf(field) {
    return element(`${field.name}-fault`);
  }

  /** The wishes of the form and others, as a query; a list is named once for each of its values. */
  query(others) {
    const wishes = this.#fields.map((field) => [field.name, field.value.trim()]).filter(([, value]) => value);
    const fixed = Object.entries(others).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
    return new URLSearchParams([...fixed, ...wishes]);
  }

  /** The command that asks for the same list; the key stays out of it. */
  curl(path, others) {
    const key = hasKey() ? ` -H "Authorization: Bearer $LISAREC_KEY"` : "";
    const wishes = [...this.query(others)].map(([name, value]) => ` --data-urlencode ${quoted(`${name}=${value}`)}`);
    return `curl -G ${quoted(location.origin + path)}${key}${wishes.join("")}`;
  }

  /** Show what is wrong with the fields, each where it is in the text; returns the details of no field. */
  mark(details) {
    const fields = this.#fields;
    for (const field of fields) {
      const reason = details.find((detail) => detail.field === field.name)?.reason;
      field.ariaInvalid = reason === undefined ? "false" : "true";
      this.#faultOf(field).replaceChildren(...(reason === undefined ? [] : faultIn(field.value.trim(), reason)));
    }
    return details.filter((detail) => !fields.some(({ name }) => name === detail.field));
  }

  async #complete(field) {
    this.#names ??= readNames();
    const names = await this.#names;
    const started = STARTED.exec(field.value.slice(0, field.selectionStart));
    const fitting = (names[started?.[1]] ?? []).filter((name) => name.startsWith(started[2]) && name !== started[2]);
    const rows = fitting.map((name) => {
      const button = make("button", { type: "button", className: "plain", textContent: name });
      button.addEventListener("click", () => this.#insert(field, name.slice(started[2].length)));
      return make("li", {}, button);
    });
    this.#completions.replaceChildren(...rows);
    this.#faultOf(field).before(this.#completions);
  }

  #insert(field, rest) {
    field.setRangeText(rest, field.selectionStart, field.selectionStart, "end");
    field.form.dispatchEvent(new Event("input")); // as after any other key, but with no completions of the completed
    this.#completions.replaceChildren();
    field.focus();
  }

  #enterCompletions(press) {
    if (press.isComposing) return; // an input method has its own candidates
    const first = this.#completions.querySelector("button");
    if (press.key === "Escape") this.#completions.replaceChildren();
    if (press.key !== "ArrowDown" || !first) return;
    press.preventDefault();
    first.focus();
  }

  #walk(press) {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[press.key];
    const buttons = [...this.#completions.querySelectorAll("button")];
    if (press.key === "Escape") this.#completions.replaceChildren();
    if (!step) return;
    press.preventDefault();
    const field = this.#completions.parentElement.querySelector("input");
    (buttons[buttons.indexOf(press.target) + step] ?? field).focus();
  }
}

/** The text with the character marked that the reason names, and the reason. */
function faultIn(text, reason) {
  const place = Number(AT_CHARACTER.exec(reason)?.[1]) - 1;
  if (Number.isNaN(place)) return [reason];
  const characters = [...text];
  const there = make("mark", { textContent: characters[place] ?? " " });
  const code = make("code", { dir: "ltr" }, characters.slice(0, place).join(""), there, characters.slice(place + 1).join(""));
  return [code, make("br"), reason];
}

/** Offer the scenarios, where the key may read them. */
async function listScenarios() {
  const { scenarios } = await call("GET", "/v1/admin/scenarios").then(({ data }) => data, () => ({ scenarios: [] }));
  element("scenarios").replaceChildren(...scenarios.map(({ name }) => make("option", { value: name })));
}

/** Names of properties, by what stands before them; those of every tenant where the key may not read the others. */
async function readNames() {
  const types = await call("GET", "/v1/admin/properties").then(({ data }) => data, () => ({ items: {}, users: {} }));
  const ofItems = [...Object.keys(types.items), ...OF_ITEMS].sort();
  return { item: ofItems, current: ofItems, user: Object.keys(types.users).sort() };
}
