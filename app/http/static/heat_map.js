// A user's state as a picture: for each decay rate, codebooks by codewords, the hotter the more they were used.

import { make } from "./elements.js";

function decay(rate) {
  return rate === 0 ? "No decay" : `Half-life of ${(Math.LN2 / rate).toPrecision(2)} events`;
}

const FULLEST = 3; // squares that the words about a map name
const NOISE = 1e-5; // more than the rounding of a state's numbers, in which a click is 1
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const bin = (book, word) => `codeword ${word + 1} of codebook ${book + 1}`;

export class HeatMap {
  #reading;
  #pointedAt = null; // cell

  /** Lay out empty maps of a served model's states. What stands in a square that is pointed at is put into `reading`. */
  constructor(place, reading, { generation, config }) {
    const { decay_rates: rates, history_codebooks: books, history_codewords: words } = config.model;
    this.#reading = reading;
    this.generation = generation;
    this.shown = null; // the state
    this.maps = rates.map((rate, r) => {
      const title = decay(rate);
      const cells = Array.from({ length: books }, (_, b) =>
        Array.from({ length: words }, (_, w) => {
          const cell = make("i");
          Object.assign(cell.dataset, { rate: r, codebook: b, codeword: w });
          return cell;
        }),
      );
      const picture = make("div", { className: "map", tabIndex: 0 });
      picture.setAttribute("role", "img");
      picture.style.setProperty("--words", words);
      picture.append(...cells.flat());
      picture.addEventListener("keydown", (press) => this.#walk(press, cells));
      picture.addEventListener("blur", () => this.#pointAt(null));
      return { title, cells, picture, scale: make("small"), keeps: Math.exp(-rate) };
    });
    place.replaceChildren(...this.maps.flatMap(({ title, scale, picture }) => [make("h3", {}, title, " ", scale), picture]));
    place.onpointerover = ({ target }) => this.#pointAt(target.dataset.rate === undefined ? null : target);
    place.onpointerleave = ({ pointerType }) => pointerType === "mouse" && this.#pointAt(null); // a finger always leaves
    this.show(null);
  }

  /** The state as it is now, null for none. What the last click added to glows. */
  show(state) {
    const before = this.shown;
    const grew = state !== null && state.event_count > (before?.event_count ?? 0);
    const hasBeenWatched = before !== null || state?.event_count === 1;
    // an event of an item without codes changes nothing, and lets nothing fade
    const hasStepped = grew && hasBeenWatched && `${state.histogram}` !== `${before?.histogram}`;
    this.maps.forEach(({ title, cells, picture, scale, keeps }, r) => {
      const uses = state?.histogram[r];
      const most = uses ? Math.max(...uses.flat(), Number.MIN_VALUE) : 1;
      const touched = [];
      cells.forEach((row, b) =>
        row.forEach((cell, w) => {
          const value = uses?.[b][w] ?? 0;
          const had = before?.histogram[r][b][w] ?? 0;
          const isTouched = hasStepped && value - had * keeps > NOISE * (1 + had); // others have faded
          cell.style.setProperty("--heat", value / most);
          cell.classList.toggle("touched", isTouched);
          if (isTouched) touched.push(bin(b, w));
        }),
      );
      scale.textContent = uses ? `colour from 0 to ${most.toFixed(2)}` : "";
      const added = touched.length ? `the last event added to ${touched.join(", ")}` : "no event since it was last shown";
      picture.ariaLabel = `${title}: ${uses ? `most used are ${fullest(uses)}` : "empty"}; ${added}`;
    });
    this.shown = state;
    this.#pointAt(this.#pointedAt);
  }

  /** Let only these bins stand out, [codebook, codeword] each; all of them again for null. */
  pointOut(bins) {
    this.maps.forEach(({ cells, picture }) => {
      picture.classList.toggle("explaining", bins !== null);
      for (const cell of picture.querySelectorAll(".speaks")) cell.classList.remove("speaks");
      // where several models are tried, the list may be another one's than the map
      for (const [book, word] of bins ?? []) cells[book]?.[word]?.classList.add("speaks");
    });
  }

  /** Say what stands in the cell; nothing for null. */
  #pointAt(cell) {
    this.#pointedAt?.classList.remove("pointed-at");
    this.#pointedAt = cell;
    cell?.classList.add("pointed-at");
    const { rate, codebook, codeword } = cell?.dataset ?? {};
    const uses = this.shown?.histogram[rate]?.[codebook][codeword] ?? 0;
    const words = cell ? `${bin(+codebook, +codeword)}: ${uses.toFixed(3)}` : "";
    this.#reading.textContent = words.charAt(0).toUpperCase() + words.slice(1);
  }

  /** Go from square to square with the arrows. */
  #walk(press, cells) {
    const move = MOVES[press.key];
    if (!move) return;
    press.preventDefault();
    const isHere = this.#pointedAt !== null && cells.flat().includes(this.#pointedAt);
    const { codebook, codeword } = isHere ? this.#pointedAt.dataset : { codebook: 0, codeword: 0 };
    const [row, column] = isHere ? [+codebook + move[0], +codeword + move[1]] : [0, 0];
    const cell = cells[row]?.[column];
    if (cell) this.#pointAt(cell);
  }
}

/** The squares that were used most, in words. */
function fullest(uses) {
  const all = uses.flatMap((row, b) => row.map((value, w) => [value, bin(b, w)]));
  const most = all.filter(([value]) => value > 0).sort(([one], [other]) => other - one);
  return most.slice(0, FULLEST).map(([value, name]) => `${name} with ${value.toFixed(2)}`).join(", ") || "none";
}
