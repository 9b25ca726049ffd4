"""The style sheet of a report: light and dark, and readable from 320 pixels on."""

from collections.abc import Iterable

from app.jobs.reports.html import SHADES

CARD_COLUMN_REM = 6.25  # the minimum width of a column; if there is less, rows become cards

CARD = """
  {0} thead {{ clip-path: inset(50%); height: 1px; overflow: hidden; position: absolute; width: 1px; }}
  {0}, {0} tbody, {0} tr, {0} th, {0} td, {0} caption {{ display: block; }}
  {0} tr {{ border-bottom: 1px solid var(--rule); padding: .5rem 0; }}
  {0} th, {0} td {{ border: 0; padding: .1rem 0; }}
  {0} td {{ display: grid; gap: 0 1rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }}
  {0} th, {0} td {{ overflow-wrap: anywhere; }}
  {0} td::before {{ color: var(--quiet); content: attr(data-column); font-size: .9rem; grid-row: 1 / 9; }}
  {0} td > * {{ grid-column: 2; }} {0} td:empty {{ display: none; }}
"""
BASE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --quiet: #57606a; --rule: #d5dae0; --panel: #f3f5f8;
        --first: #0b62c4; --second: #a8500a; --third: #14703a; --fourth: #8a2fb0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e6e9ed; --quiet: #9aa4af; --rule: #363c44; --panel: #1d2127;
          --first: #6cb2ff; --second: #f0a35e; --third: #5fd39a; --fourth: #d9a0ff; } }
* { box-sizing: border-box; }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
       max-width: 64rem; overflow-wrap: anywhere; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p, caption, figcaption, dl, li { max-width: 46rem; }
p, caption, figcaption, small { color: var(--quiet); } figure { margin: 1rem 0; }
caption { overflow-wrap: anywhere; text-align: left; }
.verdict { color: var(--text); font-size: 1.2rem; line-height: 1.4; }
code { font: .875rem ui-monospace, monospace; }
.wide { container-type: inline-size; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; width: 100%; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
th, td { unicode-bidi: plaintext; }
.breaks { overflow-wrap: anywhere; } td small, th small { display: block; font-weight: 400; }
dl { border: 1px solid var(--rule); border-radius: .4rem; display: grid; gap: .2rem 1rem;
     grid-template-columns: minmax(0, 1fr) minmax(0, 3fr); padding: .8rem 1rem; }
dt { color: var(--quiet); } dd { margin: 0; }
.plot { max-width: 46rem; } .on-narrow { display: none; max-width: 26rem; }
@media (max-width: 40rem) { .on-wide { display: none; } .on-narrow { display: block; }
  dl { grid-template-columns: minmax(0, 1fr); } dd { margin-bottom: .4rem; } }
svg { display: block; height: auto; overflow: visible; width: 100%; } svg text { fill: var(--text); font-size: 12px; }
.grid { stroke: var(--rule); } .whisker { stroke: var(--text); stroke-width: 1.5; }
.stroke { fill: none; stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: 0 0 .5rem; padding: 0; }
.mark { background: currentcolor; display: inline-block; forced-color-adjust: none;
        height: .7rem; margin-right: .4rem; width: .7rem; }
.first.mark { border-radius: 50%; } .third.mark { clip-path: polygon(50% 0, 100% 100%, 0 100%); }
.fourth.mark { clip-path: polygon(50% 0, 100% 50%, 50% 100%, 0 50%); }
"""
SHADE = """
.{0}.fill {{ fill: var(--{0}); }} .{0}.stroke, .{0}.whisker {{ stroke: var(--{0}); }} .{0}.mark {{ color: var(--{0}); }}
"""


def style_for(column_counts: Iterable[int]) -> str:
    """Return the style sheet of a page whose tables have these numbers of columns."""
    cards = [
        f"@container (max-width: {CARD_COLUMN_REM * count}rem) {{{CARD.format(f'.columns-{count}')}}}\n"
        for count in sorted(set(column_counts))
    ]
    return "".join([BASE, *map(SHADE.format, SHADES), *cards])
