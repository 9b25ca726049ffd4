// What an operator wants to know, live, from what Prometheus reads.

import { count, describe, make } from "./elements.js";

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_MS = 120_000; // that a line shows
const GAP_MS = 10_000; // between values of which some are missing in between

/** Sums of the exposition's samples: name and a condition on labels -> number; and the samples of a name. */
export function readMetrics(exposition) {
  const byName = new Map();
  for (const [, name, labels = "", value] of exposition.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const of = Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((pair) => pair.slice(1)));
    const samples = byName.get(name) ?? [];
    samples.push({ of, value: value === "+Inf" ? Infinity : Number(value) });
    byName.set(name, samples);
  }
  const all = (name) => byName.get(name) ?? [];
  const sum = (name, where = () => true) =>
    all(name).reduce((total, { of, value }) => (where(of) ? total + value : total), 0);
  return { all, sum };
}

const isCall = (of) => of.route.startsWith("/v1/");

/** Seconds within which this share of the calls was answered, as Prometheus estimates it; NaN without calls. */
export function quantile(share, now, before) {
  const under = new Map();
  for (const [metrics, sign] of [[now, 1], [before, -1]]) {
    for (const { of, value } of metrics.all("lisarec_request_seconds_bucket").filter(({ of }) => isCall(of))) {
      const bound = of.le === "+Inf" ? Infinity : Number(of.le);
      under.set(bound, (under.get(bound) ?? 0) + sign * value);
    }
  }
  const wanted = share * (under.get(Infinity) ?? 0);
  if (!wanted) return NaN;
  let [low, below] = [0, 0];
  for (const bound of [...under.keys()].sort((one, other) => one - other)) {
    const until = under.get(bound);
    if (until >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / (until - below);
    [low, below] = [bound, until];
  }
  return NaN;
}

function ms(seconds) {
  if (Number.isNaN(seconds)) return "–";
  return `≈ ${seconds < 0.01 ? (seconds * 1e3).toPrecision(2) : (seconds * 1e3).toFixed(0)} ms`;
}
const perS = (rate) => `${rate.toFixed(1)}/s`;

function age(seconds) {
  const [size, unit] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"];
  return `${(seconds / size).toFixed(0)} ${unit}`;
}

export class Operations {
  constructor(list) {
    this.list = list;
    this.before = null;
    this.lines = new Map(); // name -> the newest numbers, each with its time
  }

  /** Take what /metrics said at a moment; rates are shown from the second time on. */
  take(exposition, atMs) {
    const now = readMetrics(exposition);
    const before = this.before;
    this.before = { ...now, atMs };
    if (before === null) return;
    const rate = (name, where) => Math.max(0, now.sum(name, where) - before.sum(name, where)) / ((atMs - before.atMs) / 1e3);
    const [half, most] = [0.5, 0.99].map((share) => quantile(share, now, before));
    describe(this.list, [
      this.#line("events", rate("lisarec_events_total", (of) => of.outcome === "accepted"), perS),
      this.#line("requests", rate("lisarec_request_seconds_count", isCall), perS),
      this.#line("p50 latency", half, ms),
      this.#line("p99 latency", most, ms),
      this.#line("failed", rate("lisarec_request_seconds_count", (of) => of.status.startsWith("5")), perS),
      this.#line("in progress", now.sum("lisarec_queue_depth", (of) => of.queue === "requests"), count),
      ["log lag", lag(now)],
      ["generation", generations(now)],
    ]);
  }

  /** Forget what was before: the next rates are of what comes then. */
  pause() {
    this.before = null;
  }

  #line(name, value, inWords) {
    const values = recent([...(this.lines.get(name) ?? []), { value, atMs: this.before.atMs }]);
    this.lines.set(name, values);
    return [name, inWords(value), sparkline(name, values, inWords)];
  }
}

/** Without the values that are too old to be shown; each has a number, NaN for none, and `atMs`. */
const recent = (values) => values.filter(({ atMs }) => atMs >= values.at(-1).atMs - WINDOW_MS);

/** The values as a line with its scales: drawn for who sees it, in words for who hears it; `inWords` adds the unit. */
function sparkline(name, values, inWords) {
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

function lag(now) {
  const lags = now.all("lisarec_log_lag_seconds");
  return lags.length ? age(Math.max(...lags.map(({ value }) => value))) : "no archive";
}

function generations(now) {
  const served = now.all("lisarec_generation").filter(({ value }) => value > 0);
  const words = served.map(({ of, value }) => `${of.generation} in ${count(value)} process${value === 1 ? "" : "es"}`);
  return make("span", { textContent: words.join(", ") || "–" });
}
