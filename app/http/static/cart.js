// The cart: what is in it, and what goes together with all of it.

import { element, make } from "./elements.js";
import { call } from "./service.js";

const TOGETHER = 6;

export class Cart {
  #itemIds = [];
  #titleOf;
  #change;

  /** `titleOf` names an item; `change` is called when the cart is another one. */
  constructor(titleOf, change) {
    this.#titleOf = titleOf;
    this.#change = change;
  }

  /** What a request for a list says of the cart. */
  get wishes() {
    return this.#itemIds.length ? { basket: this.#itemIds } : {};
  }

  put(itemId) {
    if (this.#itemIds.includes(itemId)) return;
    this.#itemIds = [...this.#itemIds, itemId];
    this.#change();
  }

  empty() {
    this.#itemIds = [];
  }

  #remove(itemId) {
    this.#itemIds = this.#itemIds.filter((one) => one !== itemId);
    this.#change();
  }

  /** Show what is in the cart, and the complements of all of it, which are the same for everybody. */
  async show() {
    const itemIds = this.#itemIds;
    const chips = itemIds.map((itemId) => {
      const title = this.#titleOf(itemId);
      const name = make("span", { dir: "auto", textContent: title });
      const button = make("button", { type: "button", className: "plain", ariaLabel: `Remove ${title} from the cart` }, name, " ×");
      button.addEventListener("click", () => this.#remove(itemId));
      return make("li", {}, button);
    });
    const isRead = element("basket").contains(document.activeElement);
    element("basket").replaceChildren(...chips);
    element("cart").hidden = itemIds.length === 0;
    if (isRead) (chips[0]?.firstChild ?? element("query")).focus(); // or who types would be nowhere
    if (!itemIds.length) return;
    const request = { history: [], basket: itemIds, basket_only: true, k: TOGETHER };
    const { data } = await call("POST", "/v1/recommendations", request);
    if (itemIds !== this.#itemIds) return; // it is another one by now, which is shown next
    const rows = data.items.map(({ item_id: itemId, title }) => {
      const row = make("li", { dir: "auto", textContent: title || itemId });
      row.dataset.itemId = itemId;
      return row;
    });
    element("together").replaceChildren(...rows);
  }
}
