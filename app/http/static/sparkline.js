// The newest values of a figure as a line, with its scales: drawn for who sees it, in words for who hears it.

import { make } from "./elements.js";

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_MS = 120_000;
const GAP_MS = 10_000; // between values of which some are missing in between

/** Without the values that are too old to be shown; each has a number, NaN for none, and `atMs`. */
export const recent = (values) => values.filter(({ atMs }) => atMs >= values.at(-1).atMs - WINDOW_MS);

/** `inWords` writes a number with its unit. */
export function sparkline(name, values, inWords) {
  const known = values.map(({ value }) => value).filter((value) => !Number.isNaN(value));
  const top = Math.max(...known, 0) || 1;
  const range = `from ${inWords(Math.min(...known))} to ${inWords(Math.max(...known))}`;
  const picture = make("div", { className: "sparkline" });
  picture.setAttribute("role", "img");
  picture.ariaLabel = `${name}, last two minutes: ${known.length ? range : "no values"}`;
  const scale = [["top", known.length ? inWords(top).replace("≈ ", "") : ""], ["bottom", "0"], ["past", "2 min ago"], ["now", "now"]];
  picture.append(drawn(values, top), ...scale.map(([place, textContent]) => make("small", { className: place, textContent })));
  return picture;
}

function drawn(values, top) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", `0 0 ${WINDOW_MS} 1`);
  picture.setAttribute("preserveAspectRatio", "none");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", outline(values, top));
  picture.append(path);
  return picture;
}

/** A line through values that follow each other; one alone is a dot. */
function outline(values, top) {
  const beginMs = values.at(-1).atMs - WINDOW_MS;
  const known = values.filter(({ value }) => !Number.isNaN(value));
  const parts = known.map(({ value, atMs }, place) => {
    const point = `${(atMs - beginMs).toFixed(0)},${(1 - value / top).toFixed(4)}`;
    return place > 0 && atMs - known[place - 1].atMs < GAP_MS ? `L${point}` : `M${point}h1`;
  });
  return parts.join("");
}
