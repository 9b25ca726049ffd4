"""The result of an experiment: how the arms differ, how certain that is, and whether it is decided.

A user is assigned to an arm as a whole, and a user's events are alike, so users are the units. Their number is unknown,
because the service stores no lists, but the arms' shares of them are known. So the sum of an arm, divided by its share,
estimates what all users would do with its lists, whatever became of users without an event: they add nothing to it.

With independent assignment and small relative errors, the logarithm of the ratio of two such sums has the variance
sum(x**2) / sum(x)**2 of the one arm plus that of the other (delta method), for sums x of single users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.table import Table

from app.jobs.reports.experiment_outcomes import Measure, Outcomes
from model.metrics import Interval
from storage.records import EPOCH

FEWEST_USERS = 50  # of equal weight in each arm: with fewer, a few users decide, and intervals are too narrow
NORMAL_95 = NormalDist().inv_cdf(0.975)
TYPICAL_DIFFERENCE = 0.2  # as a logarithm: the anytime interval is narrowest for differences of about this size
MISMATCH = 4.0  # standard deviations: chance alone exceeds them in one of 16,000 looks


@dataclass(frozen=True)
class Difference:
    """How much more an arm has per user than the control, as a share of the control's.

    interval_95          contains the true difference with a probability of 95%, at one time that was fixed before
    anytime_interval_95  contains it with a probability of 95% at all times together, however often one looks
    """

    difference: float
    interval_95: Interval
    anytime_interval_95: Interval

    @property
    def is_significant(self) -> bool:
        """Whether the 95% interval excludes 0, which counts only at a time that was fixed before."""
        return _excludes_0(self.interval_95)

    @property
    def is_decided(self) -> bool:
        """Whether the arms differ, however often one has looked."""
        return _excludes_0(self.anytime_interval_95)


def _excludes_0(interval: Interval) -> bool:
    return interval[0] > 0 or interval[1] < 0


@dataclass(frozen=True)
class ArmResult:
    """A measure of one arm.

    per_list    None where `/v1/stats` does not count it
    difference  to the control; None for the control itself, and with too few users
    verdict     empty for the control
    """

    measure: Measure
    arm: str
    total: float
    per_list: float | None
    difference: Difference | None
    verdict: str


def users_of_equal_weight(sums: Sequence[float]) -> float:
    """Return how many users with equal sums would vary as much as these (Kish's effective sample size)."""
    each = np.asarray(sums)
    return float(each.sum() ** 2 / (each**2).sum()) if len(each) else 0.0


def difference(sums: Sequence[float], control: Sequence[float], share: float) -> Difference | None:
    """Compare the sums of an arm's users with those of the control's; return None if too few users have any.

    share  the number of the arm's users for one user of the control
    """
    users = users_of_equal_weight(sums), users_of_equal_weight(control)
    if min(users) < FEWEST_USERS:
        return None
    log_ratio, variance = log(sum(sums) / sum(control) / share), 1 / users[0] + 1 / users[1]

    def interval(half: float) -> Interval:
        return exp(log_ratio - half) - 1, exp(log_ratio + half) - 1

    return Difference(exp(log_ratio) - 1, interval(NORMAL_95 * sqrt(variance)), interval(_anytime(variance)))


def _anytime(variance: float) -> float:
    """Return half the width of an interval that holds at all times.

    Source: the mixture sequential probability ratio test, Johari et al., Peeking at A/B Tests, KDD 2017.
    """
    prior = TYPICAL_DIFFERENCE**2
    total = variance + prior
    return sqrt(2 * variance * total / prior * (log(1 / 0.05) + log(total / variance) / 2))


def results_of(outcomes: Outcomes) -> list[ArmResult]:
    """Return the results of every measure and arm; the first arm is the control."""
    shares = outcomes.started.experiment.shares
    control, results = next(iter(shares)), []
    for measure in sorted(outcomes.sums):
        sums = outcomes.sums[measure]
        for arm, share in shares.items():
            own, others = sums.get(arm, []), sums.get(control, [])
            found = None if arm == control else difference(own, others, share / shares[control])
            verdict = "" if arm == control else _verdict(found, own, others)
            per_list = outcomes.per_list.get((measure, arm))
            results.append(ArmResult(measure, arm, float(sum(own)), per_list, found, verdict))
    return results


def _verdict(found: Difference | None, sums: Sequence[float], control: Sequence[float]) -> str:
    if found is None:
        users = int(min(users_of_equal_weight(sums), users_of_equal_weight(control)))
        return f"not decided, too few users: an arm has {users} of equal weight, and {FEWEST_USERS} are needed"
    if found.is_decided:
        return f"decided, {'more' if found.difference > 0 else 'less'} than the control"
    if found.is_significant:
        return "not decided, unless this is the end that you fixed before the start"
    return "not decided, may be chance"


def warnings_of(outcomes: Outcomes) -> list[str]:
    """Return a warning for each arm whose share of the users, or of the lists, is not as assigned."""
    shares = outcomes.started.experiment.shares
    control, total = next(iter(shares)), sum(shares.values())
    reached = sum(outcomes.reached.values())
    found = []
    for arm, share in shares.items():
        part = share / total
        if reached:
            counted, of = outcomes.reached.get(arm, 0), f"of {reached:,} users with an impression"
            is_off = _deviates(counted, reached, part)
        else:
            lists = sum(outcomes.lists.values())
            counted, of = int(outcomes.lists.get(arm, 0)), f"of {int(lists):,} lists"
            is_off = not outcomes.started.since_us and _has_other_lists(outcomes, arm, control)
        if is_off:
            found.append(
                f"{arm} has {counted:,} {of}, but a share of {part:.1%}: more than chance explains. "
                "Find the cause, such as failed requests or a bot, before you trust the differences"
            )
    return found


def _deviates(counted: int, of: int, part: float) -> bool:
    """Return whether so many of all are not that part of them, by the likelihood ratio: it holds for few, too."""
    found = (counted, of * part), (of - counted, of * (1 - part))
    return 2 * sum(count * log(count / expected) for count, expected in found if count) > MISMATCH**2


def _has_other_lists(outcomes: Outcomes, arm: str, control: str) -> bool:
    """Return whether the ratio of the arms' lists is off. Lists vary less than what they lead to, as a rule."""
    shares, lists = outcomes.started.experiment.shares, outcomes.lists
    events = [sums for measure, sums in outcomes.sums.items() if measure.of == "events"]
    varied = max(events, key=lambda sums: sum(map(len, sums.values())), default={})
    users = {name: users_of_equal_weight(sums) for name, sums in varied.items()}
    if max(users.values(), default=0) < FEWEST_USERS:
        return False
    if not lists.get(arm):
        return True
    of_both = users.get(arm, 0), users.get(control, 0)
    if min(of_both) < FEWEST_USERS or not lists.get(control):
        return False
    off = log(lists[arm] / lists[control] / (shares[arm] / shares[control]))
    return abs(off) > MISMATCH * sqrt(1 / of_both[0] + 1 / of_both[1])


def result_table(outcomes: Outcomes, results: Sequence[ArmResult]) -> Table:
    """Return a table of the results."""
    started = outcomes.started
    since = f", lists since {_time(started.since_us)}, when the shares changed" if started.since_us else ""
    lists = "; ".join(f"{arm}: {int(outcomes.lists.get(arm, 0)):,} lists" for arm in started.experiment.shares)
    lists += ", also before the shares changed" if started.since_us else ""
    control = next(iter(started.experiment.shares))
    columns = ("arm", "total", "per list", f"per user, against {control}", "95% interval")
    table = Table("measure", *columns, title=f"experiment {started.experiment.name}{since}", caption=lists)
    for one in results:
        per_list = "" if one.per_list is None else f"{one.per_list:.4f}"
        found = one.difference
        interval = "" if found is None else " to ".join(f"{bound:+.1%}" for bound in found.interval_95)
        margin = "" if found is None else f"{found.difference:+.1%}"
        table.add_row(_label(one.measure), one.arm, f"{one.total:,.10g}", per_list, margin, interval)
    return table


def verdicts_of(results: Sequence[ArmResult]) -> list[str]:
    """Return a sentence for each arm and measure that says whether it is decided."""
    if not results:
        return ["not decided: no event has the recommendation_id of one of the experiment's lists"]
    return [f"{one.arm}, {_label(one.measure)}: {one.verdict}" for one in results if one.verdict]


def _label(measure: Measure) -> str:
    return {"users": "users with {}", "events": "{} events", "value": "{} value"}[measure.of].format(measure.event)


def _time(time_us: int) -> str:
    return f"{EPOCH + timedelta(microseconds=time_us):%Y-%m-%d %H:%M} UTC"


def to_json(outcomes: Outcomes, results: Sequence[ArmResult]) -> dict[str, Any]:
    """Return the results as JSON values."""
    started = outcomes.started
    return {
        **started.experiment.model_dump(),
        "since": _time(started.since_us) if started.since_us else None,
        "lists": {arm: outcomes.lists.get(arm, 0) for arm in started.experiment.shares},
        "users_with_impression": dict(outcomes.reached),
        "warnings": warnings_of(outcomes),
        "results": [{**asdict(one), "measure": one.measure._asdict()} for one in results],
    }
