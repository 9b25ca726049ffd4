"""A synthetic board of jobs: 60 kinds, each job open for a month, and users with one kind each.

Most jobs have few events. Titles name the kind, except one in five.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.jobs.datasets.writer import new_directory, write_interactions, write_items

JOBS, KINDS, USERS, EVENTS_OF_USER = 6_000, 60, 3_000, 12
DAYS, OPEN_DAYS = 120, 30


def write_board(target: Path) -> None:
    """Write the board's events and jobs."""
    rng = np.random.default_rng(0)
    kind, opened, appeal = (
        rng.integers(KINDS, size=JOBS),
        rng.uniform(-OPEN_DAYS, DAYS, JOBS),
        rng.lognormal(0, 1, JOBS),
    )
    shift, employer, role = rng.integers(40, size=JOBS), rng.integers(400, size=JOBS), rng.integers(5, size=JOBS)
    is_named = rng.random(JOBS) < 0.8
    ids = [f"job-{kind[job]}-{job}" for job in range(JOBS)]
    names = [
        f"role{5 * kind[job] + role[job]} kind{kind[job]}" if is_named[job] else "staff wanted" for job in range(JOBS)
    ]
    items = [(ids[job], f"{names[job]} detail{shift[job]} employer{employer[job]}", "") for job in range(JOBS)]
    rows = []
    for user in range(USERS):
        own, begin = int(rng.integers(KINDS)), rng.uniform(0, DAYS)
        for day in np.sort(np.minimum(begin + rng.exponential(10, EVENTS_OF_USER), DAYS)).tolist():
            draw, near, other = rng.random(), own // 4 * 4 + int(rng.integers(4)), int(rng.integers(KINDS))
            wanted = own if draw < 0.7 else near if draw < 0.9 else other
            is_open = np.flatnonzero((kind == wanted) & (opened <= day) & (day < opened + OPEN_DAYS))
            if len(is_open):
                job = int(rng.choice(is_open, p=appeal[is_open] / appeal[is_open].sum()))
                rows.append((f"u{user}", ids[job], 1_735_689_600 + int(day * 86_400)))
    with new_directory(target) as folder:
        write_interactions(folder, rows)
        write_items(folder, items)
