"""A small synthetic shop: goods, shoppers and their clicks, for the demo and the tests.

Shoppers go through a range in the order in which people need its goods (tent, sleeping bag, camping stove ...), mostly
stay in one or two departments, and mostly keep to one finish (blue, steel, paperback ...). So a model can learn from
the last item, from the whole history, and from both together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.jobs.datasets.writer import Row, write_interactions, write_items

OPENING_S = 1_735_689_600  # 1 January 2025
OPEN_DAYS = 300
SECONDS_PER_DAY = 86_400

START_SHARES = (0.6, 0.2, 0.1, 0.1, 0.0, 0.0)  # how often a shopper begins with each good of a range
FINISH_LOYALTY = 0.8  # how often a shopper chooses the favourite finish
NEXT_SHARE = 0.85  # the others skip a good
CHANGE_SHARE = 0.15  # how often a shopper looks at another range in between

# department -> (finishes, range -> goods in the order in which people need them)
GOODS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "Outdoor": (
        ("blue", "green", "orange"),
        {
            "Camping": (
                "Two-person tent",
                "Sleeping bag",
                "Sleeping mat",
                "Camping stove",
                "Cooking pot set",
                "Lantern",
            ),
            "Trail running": (
                "Trail running shoes",
                "Running socks",
                "Running vest",
                "Soft flask",
                "Running cap",
                "Gaiters",
            ),
            "Cycling": ("Touring bike", "Bike helmet", "Bike lights", "Bike lock", "Pannier bags", "Floor pump"),
            "Climbing": (
                "Climbing shoes",
                "Chalk bag",
                "Climbing harness",
                "Belay device",
                "Climbing rope",
                "Quickdraw set",
            ),
        },
    ),
    "Kitchen": (
        ("steel", "black", "cream"),
        {
            "Coffee": ("Espresso machine", "Coffee grinder", "Tamper", "Milk jug", "Espresso cups", "Knock box"),
            "Baking": ("Stand mixer", "Mixing bowls", "Measuring spoons", "Loaf tin", "Cooling rack", "Cake stand"),
            "Cooking": ("Chef's knife", "Chopping board", "Frying pan", "Casserole", "Colander", "Pepper mill"),
            "Tea": ("Teapot", "Tea kettle", "Tea tin", "Tea strainer", "Teacups", "Serving tray"),
        },
    ),
    "Books": (
        ("hardback", "paperback", "audiobook"),
        {
            "Crime": tuple(f"The Harbour Murders {volume}" for volume in range(1, 7)),
            "Fantasy": tuple(f"The Salt Road {volume}" for volume in range(1, 7)),
            "Science": (
                "Seven Stars",
                "The Patient Cell",
                "What Waves Know",
                "Deep Time",
                "A Map of Light",
                "Small Infinities",
            ),
            "Travel": (
                "Lisbon on Foot",
                "The Night Train",
                "Islands of Rain",
                "Across the Steppe",
                "Harbour Towns",
                "Slow Rivers",
            ),
        },
    ),
    "Garden": (
        ("small", "medium", "large"),
        {
            "Vegetables": (
                "Seed trays",
                "Potting compost",
                "Raised bed",
                "Watering can",
                "Plant labels",
                "Harvest basket",
            ),
            "Lawn": ("Lawn mower", "Lawn seed", "Spring rake", "Sprinkler", "Edging shears", "Leaf net"),
            "Balcony": ("Balcony planter", "Herb pots", "Hanging basket", "Trellis", "Folding chair", "Bird feeder"),
            "Pond": ("Pond liner", "Pond pump", "Water lilies", "Pond net", "Stepping stones", "Pond light"),
        },
    ),
    "Music": (
        ("beginner", "stage", "studio"),
        {
            "Guitar": ("Acoustic guitar", "Guitar strings", "Plectrum set", "Guitar tuner", "Guitar strap", "Capo"),
            "Piano": ("Digital piano", "Piano stool", "Sustain pedal", "Headphones", "Piano primer", "Music stand"),
            "Drums": ("Drum kit", "Drumsticks", "Drum stool", "Practice pads", "Cymbal set", "Drum rug"),
            "Recording": (
                "Microphone",
                "Microphone stand",
                "Audio interface",
                "Pop filter",
                "Monitor speakers",
                "Acoustic panels",
            ),
        },
    ),
    "Children": (
        ("red", "yellow", "turquoise"),
        {
            "Baby": ("Cot", "Baby blanket", "Changing mat", "Baby monitor", "Bouncer", "High chair"),
            "Building": ("Wooden blocks", "Marble run", "Toy crane", "Train tracks", "Toy station", "Toy bridge"),
            "Painting": ("Finger paints", "Painting apron", "Brush set", "Easel", "Paper roll", "Modelling clay"),
            "School": ("School bag", "Pencil case", "Lunch box", "Drinking bottle", "Gym bag", "Desk lamp"),
        },
    ),
}


@dataclass(frozen=True)
class ProductRange:
    """One range of a department, with the titles of each good in each finish."""

    department: str
    name: str
    titles: tuple[tuple[str, ...], ...]

    @property
    def item_ids(self) -> list[list[str]]:
        """The ids of the items: item_ids[good][finish]."""
        return [[_item_id(title) for title in finishes] for finishes in self.titles]


def generate(directory: Path, shoppers: int = 1_500, seed: int = 7) -> None:
    """Write the shop into an empty directory as a data directory; the same seed gives the same bytes."""
    ranges = _ranges()
    write_items(directory, _item_rows(ranges))
    write_interactions(directory, _interaction_rows(ranges, shoppers, np.random.default_rng(seed)))


def _ranges() -> list[ProductRange]:
    return [
        ProductRange(department, name, tuple(tuple(f"{good}, {finish}" for finish in finishes) for good in goods))
        for department, (finishes, ranges) in GOODS.items()
        for name, goods in ranges.items()
    ]


def _item_id(title: str) -> str:
    return re.sub("[^a-z0-9]+", "-", title.lower().replace("'", ""))


def _item_rows(ranges: list[ProductRange]) -> Iterator[Row]:
    for product_range in ranges:
        for finishes in product_range.titles:
            for title in finishes:
                yield _item_id(title), title, f"{product_range.department}|{product_range.name}"


def _interaction_rows(ranges: list[ProductRange], shoppers: int, rng: np.random.Generator) -> Iterator[Row]:
    for number in range(1, shoppers + 1):
        time_s = OPENING_S + int(rng.integers(OPEN_DAYS * SECONDS_PER_DAY))
        for item_id in _visit(ranges, rng):
            yield f"shopper-{number:04}", item_id, time_s
            time_s += 20 + int(rng.exponential(90))


def _visit(ranges: list[ProductRange], rng: np.random.Generator) -> Iterator[str]:
    """Return the clicks of one shopper: a few ranges, each from an early good on, with changes between them."""
    finish = int(rng.integers(3))
    open_ranges = [
        (product_range.item_ids, int(rng.choice(6, p=START_SHARES))) for product_range in _favourites(ranges, rng)
    ]
    while open_ranges:
        item_ids, good = open_ranges[0]
        chosen = finish if rng.random() < FINISH_LOYALTY else int(rng.integers(3))
        yield item_ids[good][chosen]
        good += 1 if rng.random() < NEXT_SHARE else 2
        rest = open_ranges[1:]
        still_open = [(item_ids, good)] if good < len(item_ids) else []
        open_ranges = rest + still_open if rng.random() < CHANGE_SHARE else still_open + rest


def _favourites(ranges: list[ProductRange], rng: np.random.Generator) -> list[ProductRange]:
    """Return two to five ranges, mostly of the favourite department."""
    departments = list(GOODS)
    favourite = departments[int(rng.integers(len(departments)))]
    weights = np.array([10.0 if product_range.department == favourite else 1.0 for product_range in ranges])
    chosen = rng.choice(len(ranges), size=int(rng.integers(2, 6)), replace=False, p=weights / weights.sum())
    return [ranges[index] for index in chosen]
