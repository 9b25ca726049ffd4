// The playground: one user, what is recommended to them, and the state it is made from, live.
// Everything a catalogue or a user may contain is put into the page as text, never as markup.

const K = 10;
const SEARCH_LIMIT = 20;
const SEARCH_PAUSE_MS = 120;
const WATCH_EVERY_MS = 2000;

const element = (id) => document.getElementById(id);
const own = "/v1/users/";

// ---------------------------------------------------------------- the service

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(method, path, body) {
  const headers = {};
  const key = sessionStorage.getItem("lisarec.key");
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const isJson = (answer.headers.get("content-type") || "").startsWith("application/json");
  const data = isJson ? await answer.json() : await answer.text();
  if (!answer.ok) throw new Refused(answer.status, data.error?.message ?? `the service answered ${answer.status}`);
  return { data, timing: answer.headers.get("server-timing") ?? "" };
}

function uuid7() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  new DataView(bytes.buffer).setUint32(0, Math.floor(Date.now() / 2 ** 16));
  new DataView(bytes.buffer).setUint16(4, Date.now() % 2 ** 16);
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

// ---------------------------------------------------------------- what the page knows

const titles = new Map(); // item id -> title
let model; // of the service
let isNew = !localStorage.getItem("lisarec.user"); // nobody has sent an event of this user
let user = localStorage.getItem("lisarec.user") ?? newVisitor();
let clicks = JSON.parse(localStorage.getItem("lisarec.clicks") ?? "[]"); // event ids of this page, of this user
let ranks = null; // item id -> place in the list before, of the same user
let state = null; // the user's, as it was shown last
let turn = 0; // of the newest refresh: answers to older ones are not shown

function newVisitor() {
  return `visitor-${uuid7()}`;
}

function remember() {
  if (isNew) localStorage.removeItem("lisarec.user");
  else localStorage.setItem("lisarec.user", user);
  localStorage.setItem("lisarec.clicks", JSON.stringify(clicks));
}

const titleOf = (itemId) => titles.get(itemId) || itemId;

// ---------------------------------------------------------------- acts

async function act(work) {
  try {
    await work();
    element("notice").hidden = true;
  } catch (failure) {
    if (failure.status === 401 || failure.status === 403) element("key-form").hidden = false;
    element("notice").textContent = failure.message;
    element("notice").hidden = false;
  }
}

async function click(itemId) {
  const beganMs = performance.now();
  const eventId = uuid7();
  await call("POST", "/v1/events", { event_id: eventId, user_id: user, item_id: itemId, type: "click" });
  isNew = false;
  clicks.push(eventId);
  remember();
  await refresh(beganMs);
}

async function undo() {
  await call("DELETE", `${own}${user}/events/${clicks.at(-1)}`);
  clicks.pop();
  remember();
  await refresh();
}

async function startOver() {
  if (user.startsWith("visitor-") && !isNew) await call("DELETE", own + user); // nobody else can be this visitor
  isNew = true;
  await change(newVisitor());
}

async function open(userId) {
  isNew = false;
  await change(userId);
}

async function change(userId) {
  user = userId;
  clicks = [];
  ranks = state = null;
  remember();
  await refresh();
}

async function refresh(beganMs = performance.now()) {
  const mine = ++turn;
  const [recommended, stateNow] = await Promise.all([call("GET", `${own}${user}/recommendations?k=${K}`), readState()]);
  if (mine !== turn) return;
  showRecommendations(recommended.data);
  showTiming(recommended.timing, performance.now() - beganMs);
  showState(stateNow);
  element("user").value = user;
  element("undo").disabled = clicks.length === 0;
  await showHistory(stateNow, mine);
}

async function readState() {
  if (isNew) return null;
  try {
    return (await call("GET", own + user)).data;
  } catch (failure) {
    if (failure.status === 404) return null; // nobody has seen this user yet
    throw failure;
  }
}

// ---------------------------------------------------------------- items

function itemRow(itemId, title, before, after, note) {
  const row = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "item";
  button.dataset.itemId = itemId;
  const name = document.createElement("b");
  name.dir = "auto";
  name.textContent = title || itemId;
  button.append(before, name, after);
  if (note) {
    const small = document.createElement("small");
    small.dir = "auto";
    small.textContent = note;
    button.append(document.createElement("span"), small);
  }
  button.addEventListener("click", () => act(() => click(itemId)));
  row.append(button);
  return row;
}

function text(content, className) {
  const span = document.createElement("span");
  span.textContent = content;
  span.className = className ?? "";
  return span;
}

function moved(itemId, place) {
  const before = ranks?.get(itemId);
  if (ranks === null || before === place) return text("", "moved");
  if (before === undefined) return text("new", "moved up");
  const places = Math.abs(before - place);
  const [sign, word, className] = before > place ? ["▲", "up", "moved up"] : ["▼", "down", "moved down"];
  const shown = text("", className);
  const sight = text(`${sign} ${places}`);
  sight.ariaHidden = "true";
  shown.append(sight, text(`${word} ${places}`, "unseen"));
  return shown;
}

function showRecommendations({ items, source }) {
  for (const item of items) if (item.title) titles.set(item.item_id, item.title);
  const rows = items.map((item, place) =>
    itemRow(item.item_id, item.title, moved(item.item_id, place), text(item.score.toFixed(2), "figure")),
  );
  element("recommendations").replaceChildren(...rows);
  ranks = new Map(items.map((item, place) => [item.item_id, place]));
  element("source").textContent = source;
  const first = items.length ? `first is ${titleOf(items[0].item_id)}` : "nothing to recommend";
  element("announcement").textContent = `Recommendations, ${source}: ${first}`;
}

function showTiming(header, tookMs) {
  const spans = [...header.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, ms]) => `${name} ${(+ms).toFixed(2)} ms`);
  element("timing").textContent = [...spans, `from click to list ${tookMs.toFixed(0)} ms`].join(" · ");
}

async function search() {
  const query = element("query").value.trim();
  const { data } = await call("GET", `/v1/items?limit=${SEARCH_LIMIT}&query=${encodeURIComponent(query)}`);
  if (query !== element("query").value.trim()) return; // typed on meanwhile
  for (const item of data.items) titles.set(item.item_id, item.title);
  const rows = data.items.map((item) =>
    itemRow(item.item_id, item.title, text(""), text(""), item.categories.join(" · ")),
  );
  element("found").replaceChildren(...rows);
}

async function showHistory(stateNow, mine) {
  const itemIds = stateNow?.recent_items ?? [];
  const unknown = [...new Set(itemIds)].filter((itemId) => !titles.has(itemId));
  await Promise.all(unknown.map(learnTitle));
  if (mine !== turn) return;
  const rows = itemIds.map((itemId) => {
    const row = document.createElement("li");
    row.dir = "auto";
    row.dataset.itemId = itemId;
    row.textContent = titleOf(itemId);
    return row;
  });
  element("history").replaceChildren(...rows);
}

async function learnTitle(itemId) {
  const { data } = await call("GET", `/v1/items?limit=1&query=${encodeURIComponent(itemId)}`);
  titles.set(itemId, data.items[0]?.item_id === itemId ? data.items[0].title : "");
}

// ---------------------------------------------------------------- the state

function fading(rate) {
  return rate === 0 ? "Never fades" : `Fades by half in ${(Math.LN2 / rate).toPrecision(2)} clicks`;
}

function layHistogram() {
  const { decay_rates: rates, history_codebooks: codebooks, history_codewords: codewords } = model.config.model;
  const parts = rates.map((rate, r) => {
    const part = document.createElement("div");
    part.className = "rate";
    const title = document.createElement("h3");
    title.textContent = fading(rate);
    const picture = document.createElement("div");
    picture.setAttribute("role", "img");
    const table = document.createElement("table");
    for (let b = 0; b < codebooks; b++) {
      const row = table.insertRow();
      for (let w = 0; w < codewords; w++) {
        const cell = row.insertCell();
        Object.assign(cell.dataset, { rate: r, codebook: b, codeword: w });
        cell.append(document.createElement("i"));
      }
    }
    picture.append(table);
    part.append(title, picture);
    return part;
  });
  element("histogram").replaceChildren(...parts);
}

function showState(stateNow) {
  const before = state;
  const grew = before !== null && stateNow !== null && stateNow.event_count > before.event_count;
  const first = before === null && stateNow?.event_count === 1;
  document.querySelectorAll("#histogram .rate").forEach((part, r) => {
    const uses = stateNow?.histogram[r];
    const most = uses ? Math.max(...uses.flat(), Number.MIN_VALUE) : 1;
    const touched = [];
    part.querySelectorAll("td").forEach((cell) => {
      const { codebook, codeword } = cell.dataset;
      const value = uses?.[codebook][codeword] ?? 0;
      const old = before?.histogram[r][codebook][codeword] ?? 0;
      const isTouched = (grew || first) && value > old; // all other bins have faded
      cell.firstChild.style.setProperty("--heat", value / most);
      cell.title = `codebook ${+codebook + 1}, codeword ${+codeword + 1}: ${value.toFixed(3)}`;
      cell.classList.toggle("touched", isTouched);
      if (isTouched) touched.push(`codeword ${+codeword + 1} of codebook ${+codebook + 1}`);
    });
    const what = touched.length ? `the last click added to ${touched.join(", ")}` : "no click since it was shown last";
    part.querySelector("[role=img]").ariaLabel = `${part.querySelector("h3").textContent}: ${what}`;
  });
  element("state-size").textContent = stateNow ? `${count(stateNow.event_count)} events` : "no events";
  state = stateNow;
}

// ---------------------------------------------------------------- the model and its service

const count = (number) => number.toLocaleString("en");

function pairs(list, entries) {
  const parts = entries.flatMap(([name, value]) => {
    const term = document.createElement("dt");
    const description = document.createElement("dd");
    term.textContent = name;
    description.textContent = value;
    return [term, description];
  });
  list.replaceChildren(...parts);
}

async function showModel() {
  model = (await call("GET", "/v1/model")).data;
  const { preset, decay_rates: rates, history_codebooks: b, history_codewords: w } = model.config.model;
  element("model-line").textContent = `${model.generation} · ${count(model.items)} items · ${preset}`;
  const epochs = model.metrics.epochs ?? [];
  const judged = epochs.findLast((epoch) => typeof epoch.ndcg_at_10 === "number");
  const quality = judged ? [["on validation", `HR@10 ${judged.hr_at_10.toFixed(3)}, NDCG@10 ${judged.ndcg_at_10.toFixed(3)}`]] : [];
  pairs(element("model"), [
    ["generation", model.generation],
    ["tag", model.tag],
    ["items", count(model.items)],
    ["histogram", `${rates.length} rates × ${b} codebooks × ${w} codewords, whatever the length of a history`],
    ...quality,
  ]);
  layHistogram();
}

function readMetrics(exposition) {
  const samples = [];
  for (const [, name, labels = "", value] of exposition.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const of = Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((pair) => pair.slice(1)));
    samples.push({ name, of, value: Number(value) });
  }
  return (name, where = () => true) =>
    samples.filter((sample) => sample.name === name && where(sample.of)).reduce((sum, { value }) => sum + value, 0);
}

function quantile(share, now, before) {
  const bounds = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10];
  const isOf = (bound) => (of) => Number(of.le) === bound && of.route.startsWith("/v1/");
  const under = (bound) =>
    now("lisarec_request_seconds_bucket", isOf(bound)) - before("lisarec_request_seconds_bucket", isOf(bound));
  const all = under(Infinity);
  const bound = bounds.find((one) => under(one) >= share * all);
  return all === 0 ? "–" : bound === undefined ? "> 10 s" : `≤ ${bound * 1e3} ms`;
}

let lastMetrics = null;

async function watchOnce() {
  const now = readMetrics((await call("GET", "/metrics")).data.replaceAll("+Inf", "Infinity"));
  const atMs = performance.now();
  if (lastMetrics) {
    const { then, thenMs } = lastMetrics;
    const perS = (name, where) => `${((now(name, where) - then(name, where)) / ((atMs - thenMs) / 1e3)).toFixed(1)}/s`;
    pairs(element("figures"), [
      ["events", perS("lisarec_events_total", (of) => of.outcome === "accepted")],
      ["duplicates", perS("lisarec_events_total", (of) => of.outcome === "duplicate")],
      ["requests", perS("lisarec_request_seconds_count", (of) => of.route.startsWith("/v1/"))],
      ["failed requests", perS("lisarec_request_seconds_count", (of) => of.status.startsWith("5"))],
      ["half of them within", quantile(0.5, now, then)],
      ["99 of 100 within", quantile(0.99, now, then)],
      ["at work now", count(now("lisarec_queue_depth", (of) => of.queue === "requests"))],
    ]);
    element("figures").hidden = false;
  }
  lastMetrics = { then: now, thenMs: atMs };
}

async function watch() {
  while (element("watch").checked) {
    if (!document.hidden) await act(watchOnce);
    await new Promise((resolve) => setTimeout(resolve, WATCH_EVERY_MS));
  }
  lastMetrics = null;
}

// ---------------------------------------------------------------- the page

let typing;
element("query").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => act(search), SEARCH_PAUSE_MS);
});
element("undo").addEventListener("click", () => act(undo));
element("reset").addEventListener("click", () => act(startOver));
element("watch").addEventListener("change", watch);
element("user-form").addEventListener("submit", (submit) => {
  submit.preventDefault();
  act(() => open(element("user").value.trim()));
});
element("key-form").addEventListener("submit", (submit) => {
  submit.preventDefault();
  sessionStorage.setItem("lisarec.key", element("key").value);
  element("key-form").hidden = true;
  act(begin);
});

async function begin() {
  remember();
  await showModel();
  await Promise.all([refresh(), search()]);
}

act(begin);
