// A user's state as a picture: for each rate of fading, codebooks by codewords, the hotter the more they were used.

import { make } from "./elements.js";

function fading(rate) {
  return rate === 0 ? "Never fades" : `Fades by half in ${(Math.LN2 / rate).toPrecision(2)} clicks`;
}

const NOISE = 1e-5; // more than the rounding of a state's numbers, in which a click is 1
const bin = (book, word) => `codeword ${word + 1} of codebook ${book + 1}`;

export class HeatMap {
  /** Lay out empty maps of a served model's states. */
  constructor(place, { generation, config }) {
    const { decay_rates: rates, history_codebooks: books, history_codewords: words } = config.model;
    this.generation = generation;
    this.shown = null; // the state
    this.maps = rates.map((rate, r) => {
      const title = fading(rate);
      const cells = Array.from({ length: books }, (_, b) =>
        Array.from({ length: words }, (_, w) => {
          const cell = make("i");
          Object.assign(cell.dataset, { rate: r, codebook: b, codeword: w });
          return cell;
        }),
      );
      const picture = make("div", { className: "map", role: "img" });
      picture.style.setProperty("--words", words);
      picture.append(...cells.flat());
      return { title, cells, picture, keeps: Math.exp(-rate) };
    });
    place.replaceChildren(...this.maps.flatMap(({ title, picture }) => [make("h3", { textContent: title }), picture]));
    place.onmouseover = ({ target }) => this.#name(target);
    this.show(null);
  }

  /** The state as it is now, null for none. What the last click added to glows. */
  show(state) {
    const before = this.shown;
    const grew = state !== null && state.event_count > (before?.event_count ?? 0);
    const hasBeenWatched = before !== null || state?.event_count === 1;
    // an event of an item without codes changes nothing, and lets nothing fade
    const hasStepped = grew && hasBeenWatched && `${state.histogram}` !== `${before?.histogram}`;
    this.maps.forEach(({ title, cells, picture, keeps }, r) => {
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
      const what = touched.length ? `the last click added to ${touched.join(", ")}` : "no click since it was shown last";
      picture.ariaLabel = `${title}: ${what}`;
    });
    this.shown = state;
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

  #name(cell) {
    const { rate, codebook, codeword } = cell.dataset;
    if (rate === undefined) return;
    const uses = this.shown?.histogram[rate][codebook][codeword] ?? 0;
    cell.title = `${bin(+codebook, +codeword)}: ${uses.toFixed(3)}`;
  }
}
