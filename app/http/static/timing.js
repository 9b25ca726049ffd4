// Where the time of a list went.

import { element, make, press } from "./elements.js";

/** Steps from the click to the list; what the service does not account for is the way there and back, and the page. */
export function showTiming(spans, eventMs, tookMs) {
  const steps = [...(eventMs === null ? [] : [["event", eventMs]]), ...spans];
  const rest = Math.max(0, tookMs - steps.reduce((sum, [, took]) => sum + took, 0));
  const all = [...steps, ["the rest", rest]];
  const bars = all.map(([name, took]) => {
    const bar = make("i", { className: name.replace(" ", "-") });
    bar.style.flexGrow = took;
    return bar;
  });
  const words = all.map(([name, took]) =>
    make("li", { className: name.replace(" ", "-"), textContent: `${name} ${took.toFixed(took < 10 ? 2 : 0)} ms` }),
  );
  element("time-bar").replaceChildren(...bars);
  const whole = eventMs === null ? "from request to list" : `from ${press} to list`;
  element("timing").replaceChildren(...words, make("li", { textContent: `${whole} ${tookMs.toFixed(0)} ms` }));
}
