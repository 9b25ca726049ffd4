"""Histories of some users next to the models' lists for them, for people to judge."""

from __future__ import annotations

from app.jobs.reports.html import Html, section, table, tag
from model.artifact.item_table import ItemTable
from model.evaluation.comparison import Variant
from model.evaluation.report import Report

USERS = 20
SHOWN = 10  # items of a list, and newest events of a history
ISOLATE, END_OF_ISOLATE = "\u2068", "\u2069"  # the text between runs in its own direction


def example_lists(report: Report, items: ItemTable, seed: int) -> Html | None:
    """Return a section with the lists of users drawn with the seed; None if only some candidates were ranked."""
    variants = [report.first, *report.others]
    if any(variant.results[0].recommended is None for variant in variants):
        return None
    places = report.drawn_users(USERS, seed).tolist()
    about = (
        f"{len(places)} users of {len(report.ranks):,}, selected with seed {seed}: the newest events of each, newest "
        "first, and the ten best items for the next event. The actual next item is bold."
    )
    tables = [_user_table(report, variants, items, place) for place in places]
    return section("Example users and their lists", tag("p", about), *tables)


def _user_table(report: Report, variants: list[Variant], items: ItemTable, place: int) -> Html:
    events = report.trial.events
    target = int(events.targets[place])
    newest_first = events.histories[place : place + 1].item[::-1].tolist()
    lists = [_first_items(variant, place) for variant in variants]

    def cell(item: int) -> str:
        return tag("strong", _title(items, item)) if item == target else _title(items, item)

    columns = [[_title(items, item) for item in newest_first[:SHOWN]], *([cell(item) for item in one] for one in lists)]
    rows = [
        (str(row + 1), *(column[row] if row < len(column) else "" for column in columns))
        for row in range(max(map(len, columns)))
    ]
    ranks = "; ".join(f"{variant.name}: {_rank(report, variant, place)}" for variant in variants)
    user = report.trial.interactions.user_ids[report.users[place]]
    title = f"{ISOLATE}{_title(items, target)}{END_OF_ISOLATE}"
    caption = f"{user}, {len(newest_first):,} events. Actual next item: {title}. {ranks}."
    return table(("", "newest events", *(variant.name for variant in variants)), rows, caption)


def _first_items(variant: Variant, place: int) -> list[int]:
    recommended = variant.results[0].recommended
    assert recommended is not None
    return [item for item in recommended[place, :SHOWN].tolist() if item >= 0]


def _rank(report: Report, variant: Variant, place: int) -> str:
    rank = int(variant.results[0].ranks[place])
    return "excluded, because the user has seen it" if rank > report.trial.items else f"place {rank:,}"


def _title(items: ItemTable, item: int) -> str:
    return items.titles[item] or items.ids[item]
