// The playground: one user, what is recommended to them, and the state it is made from, live.

import { Cart } from "./cart.js";
import { count, describe, element, make } from "./elements.js";
import { explain } from "./explanation.js";
import { FirstSteps } from "./first_steps.js";
import { HeatMap } from "./heat_map.js";
import { Operations } from "./operations.js";
import { Rules } from "./rules.js";
import { call, useKey, uuid7 } from "./service.js";
import { showTiming } from "./timing.js";

const WISHES = { k: 10, explain: true };
const SEARCH_LIMIT = 20;
const WATCH_EVERY_MS = 2000;
const SLIDE_MS = 350;
const NOTICED_MS = 300; // so long whoever waits need not be told
const UNTRAINED = "none"; // preset of the model that is served until there is one
const KEPT = "lisarec.playground"; // in the browser, so that a reload keeps the visitor

// ---------------------------------------------------------------- what the page knows

const titles = new Map(); // item id -> title
const visitors = new Map(); // id -> visitor, of those who were shown before
let user = firstVisitor();
let addressed = user.id; // whom the address was last written for
let ranks = null; // item id -> place in the list before, of the same user
let heatMap = null; // of the generation that is shown
let about; // template of the words about its states
const reasons = new WeakMap(); // row of the list -> why it is there
let pointedOut; // row
let acting = Promise.resolve(); // each act waits for the one before: what is known is of one user after one click
let watching; // what reads the metrics, once something was to be seen
const clicked = new Set(); // items whose clicks are being sent
const firstSteps = new FirstSteps();

/** Somebody nobody knows. `isOurs`: nobody else is this user; `clicks` are ids of events that this page has posted. */
function newVisitor() {
  return { id: `playground-${uuid7()}`, isOurs: true, isKnown: false, clicks: [] };
}

/** Who was here before; nobody where what the browser has kept is not to be read. */
function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT));
  } catch {
    return null;
  }
}

/** Somebody by their id, whom the service may know. */
const visitorOf = (id) => visitors.get(id) ?? { id, isOurs: false, isKnown: true, clicks: [] };

/** Whom the address names, or who was here before. */
function firstVisitor() {
  const [id, last] = [named("user"), kept()];
  return id === null || id === last?.id ? (last ?? newVisitor()) : visitorOf(id);
}

/** What the address names, such as the user in #user=ann&query=tea; null where it does not. */
function named(part) {
  return new URLSearchParams(location.hash.slice(1)).get(part);
}

/** Let the address name what is shown, so that it opens the same again; somebody nobody knows has no name. */
function writeAddress() {
  const write = addressed === user.id ? "replaceState" : "pushState";
  addressed = user.id;
  const query = element("query").value.trim();
  const parts = new URLSearchParams({ ...(user.isKnown && { user: user.id }), ...(query && { query }) });
  const hash = parts.size ? `#${parts}` : "";
  if (hash !== location.hash) history[write](null, "", location.pathname + hash);
}

const pathOf = (userId) => `/v1/users/${encodeURIComponent(userId)}`;
const listOf = (userId) => `${pathOf(userId)}/recommendations`;
const titleOf = (itemId) => titles.get(itemId) || itemId;

function remember() {
  localStorage.setItem(KEPT, JSON.stringify(user));
  writeAddress();
}

// ---------------------------------------------------------------- acts

/** Say what went wrong; null: nothing did. */
function say(failure) {
  reveal("key-form", lacksKey(failure));
  reveal("retry", failure !== null && mayPass(failure) && ranks === null); // this user has no list yet
  const others = rules.mark(failure?.details ?? []);
  element("failure").textContent = [failure?.message, ...others.map(({ reason }) => reason)].join(": ");
  element("notice").hidden = failure === null;
}

/** Show or hide a part of the page; whoever types in one that goes away goes on at the search. */
function reveal(id, isShown) {
  const isLeft = !isShown && element(id).contains(document.activeElement);
  element(id).hidden = !isShown;
  if (isLeft) element("query").focus();
}

const lacksKey = (failure) => [401, 403].includes(failure?.status);

/** Whether the same request may be answered later: the service did not refuse it for what it asks. */
const mayPass = ({ status }) => status === 429 || !(status >= 400 && status < 500);

function act(work) {
  acting = acting.then(() => visibly(work)).then(() => say(null), say).then(() => firstSteps.show());
}

/** Do the work; the page is busy if it takes long. */
async function visibly(work) {
  const main = document.querySelector("main");
  const waiting = setTimeout(() => (main.ariaBusy = "true"), NOTICED_MS);
  try {
    await work();
  } finally {
    clearTimeout(waiting);
    main.ariaBusy = "false";
  }
}

/** Click on the item, once for a double click and for impatient ones. */
function choose(itemId, { detail: turn }) {
  if (turn > 1 || clicked.has(itemId)) return;
  clicked.add(itemId);
  act(() => click(itemId).finally(() => clicked.delete(itemId)));
}

async function click(itemId) {
  const beganMs = performance.now();
  const event = { event_id: uuid7(), user_id: user.id, item_id: itemId, type: "click" };
  user.isKnown = true;
  user.clicks.push(event.event_id); // before it is sent: of an answer that is lost nobody knows whether it counts
  remember();
  await call("POST", "/v1/events", event);
  firstSteps.chose();
  await refresh(beganMs, performance.now() - beganMs);
}

async function undo() {
  if (!user.clicks.length) return;
  try {
    await call("DELETE", `${pathOf(user.id)}/events/${user.clicks.at(-1)}`);
  } catch (failure) {
    if (failure.status !== 404) throw failure; // it never arrived, or is forgotten
  }
  user.clicks.pop();
  remember();
  await refresh();
}

async function startOver() {
  if (user.isOurs && user.isKnown) await call("DELETE", pathOf(user.id));
  await become(newVisitor());
}

async function become(somebody) {
  visitors.set(user.id, user);
  user = somebody;
  ranks = null;
  cart.empty();
  showCommand("");
  showNobody();
  await refresh();
}

/** Show what an address names. */
async function open(id, query) {
  element("query").value = query ?? "";
  search();
  const next = id !== null ? visitorOf(id) : user.isKnown ? newVisitor() : user;
  if (next.id !== user.id) await become(next);
}

/** Show nothing of a user, until something is known of the next one. */
function showNobody() {
  const found = element("personal").checked ? ["found", "found-line"] : []; // in the order of the one before
  for (const id of ["recommendations", "source", "history", "state-size", ...found]) element(id).replaceChildren();
  if (heatMap === null) return;
  heatMap.show(null);
  pointOut(null);
}

/** Show the list and the user; where the list is refused, what is known of the user all the same. */
async function refresh(beganMs = performance.now(), eventMs = null) {
  const listing = showList(beganMs, eventMs);
  const reading = readState();
  reading.catch(() => {}); // it is awaited below
  const generation = await listing.catch(() => null);
  if (heatMap !== null) await showUser(await reading, generation);
  await listing;
  watching ??= watch();
}

/** Show the list; returns the generation that made it. */
async function showList(beganMs, eventMs) {
  const recommending = call("GET", `${listOf(user.id)}?${rules.query(wishes())}`);
  const [{ data, spans }] = await Promise.all([recommending, heatMap ?? showModel(), cart.show()]);
  showRecommendations(data);
  showTiming(spans, eventMs, performance.now() - beganMs);
  return data.generation;
}

async function showUser(state, generation) {
  const serving = state?.generation ?? generation ?? heatMap.generation;
  if (serving !== heatMap.generation) await showModel(); // another one serves now
  showState(state);
  await showHistory(state);
  if (element("personal").checked) await search(); // the order is the user's, who is another one now
}

/** The user's state, null for whom nobody has seen yet. */
async function readState() {
  if (!user.isKnown) return null; // and the browser need not complain of a 404
  try {
    return (await call("GET", pathOf(user.id))).data;
  } catch (failure) {
    if (failure.status === 404) return null;
    throw failure;
  }
}

// ---------------------------------------------------------------- rules

const rules = new Rules(element("rules-form"), () => act(() => refresh()));
const cart = new Cart(titleOf, () => {
  showCommand("");
  act(() => refresh());
});

const wishes = () => ({ ...WISHES, ...cart.wishes });

async function copyCurl() {
  const command = rules.curl(listOf(user.id), wishes());
  try {
    await navigator.clipboard.writeText(command);
    showCommand(command, "copied");
  } catch {
    showCommand(command, "the browser does not allow copying; the command is below"); // it is no secure context
  }
}

function showCommand(command, note = "") {
  element("curl").textContent = command;
  element("copied").textContent = note;
}

// ---------------------------------------------------------------- items

function itemRow(itemId, title, before, after) {
  const name = make("b", { dir: "auto", textContent: title || itemId });
  const button = make("button", { type: "button", className: "item" }, before, name, after);
  button.dataset.itemId = itemId;
  button.addEventListener("click", (press) => choose(itemId, press));
  // the arrow to the right goes there
  const adding = make("button", { type: "button", className: "plain add", textContent: "+ cart", tabIndex: -1 });
  adding.ariaLabel = `+ cart: ${title || itemId}`;
  adding.addEventListener("click", () => cart.put(itemId));
  return make("li", {}, button, adding);
}

/** Show other rows; who reads the list stays where they were. */
function replaceRows(list, rows) {
  const focused = [...list.children].findIndex((row) => row.querySelector(":focus"));
  list.replaceChildren(...rows);
  if (focused >= 0) (rows[Math.min(focused, rows.length - 1)]?.firstChild ?? element("query")).focus();
}

const text = (textContent, className = "") => make("span", { textContent, className });

function moved(itemId, place) {
  const before = ranks?.get(itemId);
  if (ranks === null || before === place) return text("", "moved");
  if (before === undefined) return text("new", "moved up");
  const places = Math.abs(before - place);
  const [sign, word] = before > place ? ["▲", "up"] : ["▼", "down"];
  const sight = make("span", { textContent: `${sign} ${places}`, ariaHidden: "true" });
  return make("span", { className: `moved ${word}` }, sight, text(`${word} ${places}`, "unseen"));
}

function showRecommendations({ items, source }) {
  for (const { item_id: itemId, title } of items) if (title) titles.set(itemId, title);
  const list = element("recommendations");
  const were = tops(list);
  const rows = items.map((item, place) => {
    const rank = make("span", { className: "place" }, text(String(place + 1), "rank"), moved(item.item_id, place));
    const score = make("span", { className: "score" }, text("score ", "unseen"), text(item.score.toFixed(2), "figure"));
    return explained(itemRow(item.item_id, item.title, rank, score), explain(item, source), place);
  });
  replaceRows(list, rows);
  pointOut(null); // first of all the click is to be seen
  if (ranks !== null) slide(list, were);
  ranks = new Map(items.map((item, place) => [item.item_id, place]));
  element("source").textContent = source;
  const first = items.length ? `first is ${titleOf(items[0].item_id)}` : "nothing to recommend";
  element("announcement").textContent = `Recommendations, ${source}: ${first}`;
}

/** The row with the words that say why it is there: for who hears the page, and for `pointOut`. */
function explained(row, { words, bins }, place) {
  const button = row.firstChild;
  const description = make("span", { id: `why-${place}`, hidden: true }, ...words);
  button.setAttribute("aria-describedby", description.id);
  // where there is neither pointer nor Tab, a finger asks with this
  const whyButton = make("button", { type: "button", className: "plain why", textContent: "why?", tabIndex: -1 });
  whyButton.ariaHidden = "true";
  whyButton.addEventListener("click", () => {
    pointOut(row);
    element("state").scrollIntoView({ behavior: "smooth", block: "nearest" });
  });
  reasons.set(row, { description, bins });
  row.append(description, whyButton);
  return row;
}

/** Say why the row is there, and show where in the state; nothing of it for null. */
function pointOut(row) {
  if (row === pointedOut) return;
  pointedOut = row;
  const { description, bins } = reasons.get(row) ?? { bins: null };
  if (row) firstSteps.explained();
  element("why").replaceChildren(...(description ?? about.content).cloneNode(true).childNodes);
  heatMap.pointOut(bins);
}

const tops = (list) =>
  new Map([...list.children].map((row) => [row.firstChild.dataset.itemId, row.getBoundingClientRect().top]));

/** Let each row come from where it was, and new ones appear. */
function slide(list, were) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const are = tops(list);
  for (const row of list.children) {
    const itemId = row.firstChild.dataset.itemId;
    const from = were.get(itemId);
    const begin = from === undefined ? { opacity: 0 } : { transform: `translateY(${from - are.get(itemId)}px)` };
    row.animate([begin, {}], { duration: SLIDE_MS, easing: "ease-out" });
  }
}

let isSearching = false;
let isOutdated = false; // what was found, or is looked for

/** Look for what stands there, one search after the other, the newest last. */
async function search() {
  isOutdated = true;
  if (isSearching) return; // whoever is at it goes on until it has shown what stands there
  isSearching = true;
  try {
    while (isOutdated) {
      isOutdated = false;
      const [query, isPersonal] = [element("query").value.trim(), element("personal").checked];
      const ofUser = isPersonal ? `&user_id=${encodeURIComponent(user.id)}` : "";
      const path = `/v1/items?limit=${SEARCH_LIMIT}&query=${encodeURIComponent(query)}${ofUser}`;
      await call("GET", path).then(({ data }) => showFound(query, data.items, isPersonal), showNotFound);
    }
  } finally {
    isSearching = false;
  }
}

function showFound(query, items, isPersonal) {
  for (const item of items) titles.set(item.item_id, item.title);
  const rows = items.map((item) => {
    const warnings = [...(item.available ? [] : ["not available"]), ...(item.known ? [] : ["not learned yet"])];
    const note = [...warnings, ...item.categories].join(" · ");
    const row = itemRow(item.item_id, item.title, "", make("small", { dir: "auto", textContent: note }));
    row.firstChild.classList.toggle("unavailable", !item.available);
    return row;
  });
  replaceRows(element("found"), rows);
  element("found").scrollTop = 0;
  const several = items.length === SEARCH_LIMIT ? `the first ${items.length}` : `${items.length}`;
  const [order, all] = isPersonal ? ["best for this user first", "Best for this user first"] : ["closest first", "Most popular first"];
  const found = items.length ? `Matches for “${query}”: ${several}, ${order}` : `No matches for “${query}”`;
  element("found-line").textContent = query ? found : items.length ? all : "The catalogue is empty";
}

/** Say why nothing was found, beside the search, where the next one takes it back. */
function showNotFound({ message }) {
  replaceRows(element("found"), []);
  element("found-line").textContent = message;
}

async function showHistory(state) {
  const itemIds = state?.recent_items ?? [];
  const unknown = [...new Set(itemIds)].filter((itemId) => !titles.has(itemId));
  await Promise.all(unknown.map(learnTitle));
  const rows = itemIds.map((itemId) => {
    const row = make("li", { dir: "auto", textContent: titleOf(itemId) });
    row.dataset.itemId = itemId;
    return row;
  });
  if (state?.event_count && !rows.length) rows.push(make("li", { textContent: "no items that the model has learned" }));
  element("history").replaceChildren(...rows);
}

async function learnTitle(itemId) {
  const { data } = await call("GET", `/v1/items/${encodeURIComponent(itemId)}`);
  titles.set(itemId, data.title);
}

// ---------------------------------------------------------------- the state, the model

function showState(state) {
  heatMap.show(state);
  if (state === null) user.clicks = []; // the service has forgotten them
  remember(); // now that the service has taken the id
  const events = state?.event_count ?? 0;
  element("state-size").textContent = `${count(events)} event${events === 1 ? "" : "s"}`;
  element("user").value = user.id;
  element("user").setCustomValidity("");
  const undoing = document.activeElement === element("undo");
  element("undo").disabled = user.clicks.length === 0;
  if (undoing && element("undo").disabled) element("history").focus(); // or who types would be nowhere
}

async function showModel() {
  const { data: model } = await call("GET", "/v1/model");
  const isTrained = model.config.model.preset !== UNTRAINED;
  heatMap = new HeatMap(element("histogram"), element("square"), model);
  for (const id of ["axes", "legend", "histogram", "card"]) element(id).hidden = !isTrained;
  about = element(isTrained ? "what" : "untrained");
  pointedOut = undefined;
  pointOut(null);
  if (isTrained) describeModel(model);
  else element("model-line").textContent = "no model yet";
}

function describeModel(model) {
  const { preset, decay_rates: rates, history_codebooks: books, history_codewords: words } = model.config.model;
  const data = model.config.data ?? {};
  element("model-line").textContent = `${model.generation} · ${count(model.items)} items · ${preset}`;
  const measured = (model.metrics.epochs ?? []).filter((epoch) => typeof epoch.ndcg_at_10 === "number");
  // whose weights were kept
  const [best] = measured.sort((one, other) => other.ndcg_at_10 - one.ndcg_at_10 || other.epoch - one.epoch);
  const learned = data.events ? [["learned from", `${count(data.events)} events of ${count(data.users)} users`]] : [];
  const quality = best ? `HR@10 ${best.hr_at_10.toFixed(3)}, NDCG@10 ${best.ndcg_at_10.toFixed(3)}` : "not measured";
  const rules = best ? ` (split ${data.split}, seen rule ${data.seen_rule}, data ${data.sha256.slice(0, 16)})` : "";
  describe(element("model"), [
    ["generation", `${model.generation}, ${model.tag}`],
    ["items", count(model.items)],
    ...learned,
    ["on validation", quality + rules],
    ["a user's state", `at most ${count(model.state_bytes)} bytes, however long the history`],
    ["histogram", `${rates.length} rates × ${books} codebooks × ${words} codewords`],
  ]);
  element("axes").textContent = `Each row is one of ${books} codebooks, each column one of ${words} codewords.`;
}

// ---------------------------------------------------------------- operations

const operations = new Operations(element("figures"));

async function watch() {
  for (;;) {
    if (document.hidden || !element("watch").checked) operations.pause();
    else await look();
    await new Promise((resolve) => setTimeout(resolve, WATCH_EVERY_MS));
  }
}

async function look() {
  try {
    operations.take((await call("GET", "/metrics")).data, performance.now());
  } catch (failure) {
    operations.pause(); // a service that is gone comes back
    describe(element("figures"), [["unavailable", failure.message]]);
    if (lacksKey(failure)) element("watch").checked = false;
  }
}

// ---------------------------------------------------------------- the page

/** Up and down go through a list, right and left through a row; down from the search goes into what was found. */
function walk(press) {
  if (press.isComposing) return; // an input method, as for Japanese, has its own candidates
  const step = { ArrowDown: 1, ArrowUp: -1 }[press.key];
  const [row, beside] = [press.target.closest("li"), { ArrowRight: ".add", ArrowLeft: ".item" }[press.key]];
  if (!step && !(row && beside)) return;
  const list = press.target.closest("#found, #recommendations") ?? element("found");
  const buttons = [...list.querySelectorAll(".item")];
  const next = step ? buttons[buttons.indexOf(row?.firstChild) + step] : row.querySelector(beside);
  if (next) press.preventDefault();
  next?.focus();
}

for (const id of ["query", "found", "recommendations"]) element(id).addEventListener("keydown", walk);
element("recommendations").addEventListener("focusin", ({ target }) => {
  if (target.matches(":focus-visible")) pointOut(target.closest("li"));
});
for (const id of ["recommendations", "state"]) {
  element(id).addEventListener("focusout", ({ relatedTarget }) => {
    if (!element("state").contains(relatedTarget)) pointOut(null); // who reads the squares still wants to see them
  });
}
element("recommendations").addEventListener("pointermove", ({ target, pointerType, movementX, movementY }) => {
  // and not where the list moves under the pointer
  if (pointerType === "mouse" && (movementX || movementY)) pointOut(target.closest("li"));
});
element("recommendations").addEventListener("pointerleave", ({ pointerType }) => {
  if (pointerType === "mouse") pointOut(null);
});
for (const id of ["query", "personal"]) element(id).addEventListener("input", search);
element("query").addEventListener("change", writeAddress);
window.addEventListener("popstate", () => {
  const [id, query] = [named("user"), named("query")]; // now, because an act that is not done yet may write the address
  act(() => open(id, query));
});
element("copy-curl").addEventListener("click", copyCurl);
element("rules-form").addEventListener("input", () => showCommand("")); // it would ask for another list
element("undo").addEventListener("click", () => act(undo));
element("reset").addEventListener("click", () => act(startOver));
element("user").addEventListener("input", ({ target }) => {
  target.setCustomValidity(target.value.trim() ? "" : "Enter an id that is not only spaces.");
});
element("user-form").addEventListener("submit", (submit) => {
  submit.preventDefault();
  act(() => become(visitorOf(element("user").value.trim())));
});
element("key-form").addEventListener("submit", (submit) => {
  submit.preventDefault();
  useKey(element("key").value);
  act(begin);
});

element("retry").addEventListener("click", () => act(begin));

async function begin() {
  element("failure").textContent = ""; // so that the same one is announced again, too
  search(); // clicks need not wait for it
  await refresh();
}

element("query").value = named("query") ?? "";
element("unstarted").remove();
act(begin);
