// Why an item is recommended, in words, and which bins of the state it shares.

import { make } from "./elements.js";

const named = ({ title, item_id: itemId }) => make("em", { dir: "auto", textContent: title || itemId });

/** "a", "a and b", "a, b and c" */
function listed(nodes) {
  return nodes.flatMap((node, place) => [place === 0 ? "" : place < nodes.length - 1 ? ", " : " and ", node]);
}

/** The parts of a score besides the codewords, in words. */
const PARTS = {
  bias: "for its bias, the same for every user",
  follows: "for what it follows",
  boost: "for the boost",
  objective: "for the objective",
  rotation: "for its impressions",
  basket: "for the cart",
};

const signed = (number) => `${number < 0 ? "− " : "+ "}${Math.abs(number).toFixed(2)}`;

function sum({ score, explanation }) {
  const { codewords, other_codewords: others } = explanation;
  const shared = codewords.reduce((total, { adds }) => total + adds, others);
  const rest = Object.entries(PARTS).filter(([part]) => explanation[part] !== undefined);
  const added = rest.map(([part, words]) => ` ${signed(explanation[part])} ${words}`);
  return `Score ${score.toFixed(2)}: ${shared.toFixed(2)} for its codewords${added.join("")}.`;
}

/** Why an item is in a list that is not scored by codewords. */
function unscored({ pinned, repeat }, source) {
  if (pinned) return " is pinned to this place.";
  if (repeat) {
    const { times, last_days: days, interval_days: interval } = repeat;
    const often = `${times} time${times === 1 ? "" : "s"}`;
    return ` was bought ${often}, ${days.toFixed(1)} days ago most recently; it is due about every ${interval.toFixed(1)} days.`;
  }
  if (source === "together") return " is often bought together with the items in the cart.";
  return " is popular: its score comes from how often all users choose it.";
}

/** Nodes that say why an item is in a list of this source; [codebook, codeword] of the bins that speak for it. */
export function explain(item, source) {
  const { explanation } = item;
  const title = make("b", { dir: "auto", textContent: item.title || item.item_id });
  if (!explanation) {
    return { words: [title, unscored(item, source)], bins: [] };
  }
  const { history, recent_items: recent } = explanation;
  const followed = recent.filter(({ follows }) => follows > 0);
  const like = recent.filter(({ follows }) => follows <= 0);
  const shares = [...new Set(history.map(({ share }) => `${Math.round(share * 100)}%`))];
  const words = [title];
  if (followed.length) words.push(" comes more often after ", ...listed(followed.map(named)), " than after other items.");
  if (followed.length && like.length) words.push(" It");
  if (like.length) words.push(" shares codewords with ", ...listed(like.map(named)), ".");
  if (!recent.length) words.push(" shares no codeword with the newest items.");
  if (shares.length) words.push(` Its marked codewords make up ${listed(shares).join("")} of the history.`);
  words.push(" ", make("small", { textContent: sum(item) }));
  return { words, bins: history.map(({ codebook, codeword }) => [codebook, codeword]) };
}
