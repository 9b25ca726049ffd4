// Why an item is recommended, in words, and which bins of the state it shares.

import { make } from "./elements.js";

const named = ({ title, item_id: itemId }) => make("em", { dir: "auto", textContent: title || itemId });

/** "a", "a and b", "a, b and c" */
function listed(nodes) {
  return nodes.flatMap((node, place) => [place === 0 ? "" : place < nodes.length - 1 ? ", " : " and ", node]);
}

const signed = (number) => `${number < 0 ? "− " : "+ "}${Math.abs(number).toFixed(2)}`;

function sum({ score, explanation: { codewords, other_codewords: others, bias, follows, basket } }) {
  const shared = codewords.reduce((total, { adds }) => total + adds, others);
  const ofCart = basket ? ` ${signed(basket)} for the cart` : "";
  return `Score ${score.toFixed(2)}: ${shared.toFixed(2)} for its codewords ${signed(bias)} for everybody ${signed(follows)} for what it follows${ofCart}.`;
}

/** Nodes that say why; [codebook, codeword] of the bins that speak for it. */
export function explain(item) {
  const { explanation } = item;
  const title = make("b", { dir: "auto", textContent: item.title || item.item_id });
  if (!explanation) {
    return { words: [title, " is what many choose, which is what its score counts."], bins: [] };
  }
  const { history, recent_items: recent } = explanation;
  const followed = recent.filter(({ follows }) => follows > 0);
  const like = recent.filter(({ follows }) => follows <= 0);
  const shares = [...new Set(history.map(({ share }) => `${Math.round(share * 100)} %`))];
  const words = [title];
  if (followed.length) words.push(" comes more often after ", ...listed(followed.map(named)), " than after other items.");
  if (followed.length && like.length) words.push(" It");
  if (like.length) words.push(" shares codewords with ", ...listed(like.map(named)), ".");
  if (!recent.length) words.push(" shares no codeword with the newest items.");
  if (shares.length) words.push(` Its marked codewords make up ${listed(shares).join("")} of the history.`);
  words.push(" ", make("small", { textContent: sum(item) }));
  return { words, bins: history.map(({ codebook, codeword }) => [codebook, codeword]) };
}
