"""Items that training has not seen: how often and how well they are recommended once events introduce them.

Every tenth item of a data set is held out of training. Then all events come in order of time, as live ones would. An
item gets codes when enough users with a history have chosen it, and again when more have. An event steps with the codes
its item has at that moment, or not at all. Each test event is ranked when its time has come, by what is known then.

History codes are what the items before it vote for. Target codes and bias are those under which it is likeliest that
just these users, with their queries, chose it, and others did not: training's softmax for one item among many, which
the model's own answers to a sample of queries stand for, found codebook by codebook. A few events cannot tell 256
codewords apart; a prior by the votes decides where they do not.

    python -m benchmarks.cold_items --data $LISAREC_DATA/online-retail --plain models/retail --without models/tenth

--plain is a model of all items, of ``lisarec train --protocol temporal``; --without is trained here, in the same split
and with the same settings, where it is not there yet.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.scan import cpu
from model import artifact, data
from model.artifact import Artifact, Items
from model.data import Interactions, Split
from model.evaluate import prepare
from model.histogram import history_histogram
from model.lisa import LisaMini, sum_of_codewords
from model.metrics import difference, difference_interval_95, interval_95, metrics
from model.train import EpochReport, Trainer

EVERY = 10
EVIDENCE = (10, 30, 100)  # events with known items before them, at which an item's codes are voted for
PRIOR = 5.0  # how many events the votes are worth; of 1, 5 and 20, the best on validation
SAMPLE = 600  # queries that stand for those of all users
SAMPLED_EVERY = 150  # events
SWEEPS = 3  # over the codebooks
CONTEXT = 5  # known items before an event that vote
FADING = 0.2  # of their votes, per item further back
USUAL_EVENTS = 10.0  # an item's vote counts as 1 / sqrt(its training events + this), or the popular ones decide alone
NEVER = 1 << 30  # the rank of what cannot be recommended
K = 10

console = Console()


class Codes(NamedTuple):
    """Of one item, and its bias."""

    history: NDArray[np.int64]
    target: NDArray[np.int64]
    bias: float


def held_out_items(interactions: Interactions) -> NDArray[np.bool_]:
    """Every tenth item in order of ids: (items,)."""
    held = np.zeros(len(interactions.item_ids), bool)
    held[np.argsort(np.array(interactions.item_ids))[::EVERY]] = True
    return held


class Quiet:
    """Of training, tells the epochs."""

    def batch(self, epoch: int, share: float, loss: float) -> None: ...

    def epoch(self, report: EpochReport) -> None:
        console.print(report)


def train_without(directory: Path, interactions: Interactions, parts: Split, plain: Artifact, out: Path) -> None:
    """Train on the same events save those of the held-out items, with the plain model's settings."""
    held = held_out_items(interactions)
    kept = ~held[interactions.item]
    row = np.cumsum(~held) - 1
    place = np.cumsum(kept) - 1
    known = replace(
        interactions,
        item_ids=[name for name, is_held in zip(interactions.item_ids, held, strict=True) if not is_held],
        user=interactions.user[kept],
        item=row[interactions.item[kept]].astype(np.int32),
        type=interactions.type[kept],
        timestamp_us=interactions.timestamp_us[kept],
        value=interactions.value[kept],
    )
    validation = place[parts.validation[kept[parts.validation]]]
    validation = validation[validation > known.starts[known.user[validation]]]  # which needs something before it
    train = parts.train[kept]
    trainer = Trainer(known, Split(train, validation, validation[:0]), plain.config, out, "cpu")
    trainer.fit(Quiet(), resume=False)
    texts = data.read_items(directory)
    items = Items(
        known.item_ids,
        [texts.titles.get(name, "") for name in known.item_ids],
        [texts.categories.get(name, ()) for name in known.item_ids],
        np.bincount(known.item[train], minlength=len(known.item_ids)).astype(np.int64),
    )
    artifact.save(out, trainer.model, plain.config, items, {})


def with_room(model: LisaMini, more: int) -> LisaMini:
    """The model with rows for more items, which have no codes and cannot be recommended yet."""
    wider = LisaMini(
        model.config,
        torch.nn.functional.pad(model.history_codes, (0, 0, 0, more)),
        torch.nn.functional.pad(model.target_codes, (0, 0, 0, more)),
    )
    state = model.state_dict()
    wanting = {"history_codes": 0, "target_codes": 0, "followers": -1, "lift": 0}
    for name, value in wanting.items():
        state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, more), value=value)
    state["bias"] = torch.nn.functional.pad(state["bias"], (0, more), value=float(state["bias"].median()))
    wider.load_state_dict(state)
    return wider.eval()


@dataclass
class Chosen:
    """A new item's first event, as a number of events, and of each of its events the items and the query before."""

    since: int
    before: list[tuple[int, ...]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)


class Live:
    """A service that learns of new items from events, one after the other; rows from `known` on are theirs."""

    def __init__(self, trained: Artifact, new_items: int, evidence: Sequence[int]) -> None:
        self.known = len(trained.items)
        self._trained = trained
        self._model = with_room(trained.model, new_items)
        self._evidence = evidence
        self._enough = max(evidence, default=0)
        self._vectors = self._model.item_vectors(torch.arange(self.known))
        self._steps = defaultdict[int, list[tuple[int, NDArray[np.int64]]]](list)  # by user
        self._before: dict[int, deque[int]] = {}  # by user, newest known items, newest first
        self._chosen: dict[int, Chosen] = {}
        self._has_codes: set[int] = set()
        self._events = 0
        self._sample: deque[tuple[Tensor, Tensor]] = deque(maxlen=SAMPLE)  # queries, logarithms of their softmax's sum

    def receive(self, user: int, item: int) -> None:
        self._events += 1
        before = self._before.setdefault(user, deque(maxlen=CONTEXT))
        if self._events % SAMPLED_EVERY == 0 and before:
            query = self._query(user)
            self._sample.append((query, torch.logsumexp(self._vectors @ query + self._model.bias[: self.known], 0)))
        if item >= self.known and before:
            self._learn(user, item, tuple(before))
        if item < self.known:
            before.appendleft(item)
        if item < self.known or item in self._has_codes:
            self._steps[user].append((item, self._model.history_codes[item].numpy().copy()))

    def _learn(self, user: int, item: int, before: tuple[int, ...]) -> None:
        chosen = self._chosen.setdefault(item, Chosen(self._events))
        if len(chosen.before) == self._enough:
            return
        chosen.before.append(before)
        chosen.queries.append(self._query(user))
        if len(chosen.before) in self._evidence and self._sample:
            codes = self._likeliest(chosen)
            self._model.history_codes[item] = torch.from_numpy(codes.history)
            self._model.target_codes[item] = torch.from_numpy(codes.target)
            self._model.bias[item] = codes.bias
            self._has_codes.add(item)

    def _likeliest(self, chosen: Chosen) -> Codes:
        shape, books = self._trained.config.model, self._model.target_codebooks
        votes = self._votes(chosen.before, self._trained.target_codes, shape.target_codewords)  # (B', W')
        prior = PRIOR * np.log((votes + 1) / (votes + 1).sum(axis=1, keepdims=True))
        log_prior = torch.from_numpy(prior).float()
        queries, sums = (torch.stack(part) for part in zip(*self._sample, strict=True))
        by_users = torch.einsum("qd,bwd->bqw", torch.stack(chosen.queries), books)
        by_all = torch.einsum("qd,bwd->bqw", queries, books)
        count = len(chosen.queries)
        codes = votes.argmax(axis=1)
        for _ in range(SWEEPS):
            for book in range(len(books)):
                others = [other for other in range(len(books)) if other != book]
                of_users = by_users[book] + _scores(by_users, codes, others)  # (count, W')
                of_all = by_all[book] + _scores(by_all, codes, others) - sums[:, None]
                # the likelihood with the best bias for each codeword
                likelihood = of_users.sum(dim=0) - count * torch.logsumexp(of_all, dim=0)
                codes[book] = int((likelihood + log_prior[book]).argmax())
        of_all = _scores(by_all, codes, range(len(books)))[:, 0] - sums
        events = max(self._events - chosen.since, count) / len(self._sample)  # that one query of the sample stands for
        bias = float(np.log(count / events) - torch.logsumexp(of_all, dim=0))
        learned = self._model.bias[: self.known]
        history = self._votes(chosen.before, self._trained.history_codes, shape.history_codewords).argmax(axis=1)
        return Codes(history, codes, min(max(bias, float(learned.min())), float(learned.max())))

    def _votes(self, before: Sequence[tuple[int, ...]], codes: NDArray[np.uint8], words: int) -> NDArray[np.float64]:
        """Of the items before, for each codeword: (books, words)."""
        rows = np.array([row for items in before for row in items])
        fading = np.array([np.exp(-FADING * place) for items in before for place in range(len(items))])
        weights = fading / np.sqrt(self._trained.items.counts[rows] + USUAL_EVENTS)
        return np.array([np.bincount(book, weights, words) for book in codes[rows].T])

    def _query(self, user: int) -> Tensor:
        """What the user's state asks: (D,)."""
        steps, shape = self._steps[user], self._model.config
        codes = np.stack([codes for _, codes in steps]).astype(np.uint8)
        histogram = history_histogram(codes, shape.decay_rates, shape.history_codewords)
        recent = self._recent(user)
        return self._model.read(torch.from_numpy(histogram)[None], recent[:, 0], recent, self._trained.tables)[0]

    def _recent(self, user: int) -> Tensor:
        newest = [item for item, _ in self._steps[user][::-1][: self._model.config.recent_items]]
        return torch.tensor([newest + [-1] * (self._model.config.recent_items - len(newest))])

    def scores(self, user: int) -> NDArray[np.float32]:
        """Of every item for the user's next event; minus infinity for those without codes."""
        if not self._steps[user]:
            return np.full(len(self._model.bias), -np.inf, np.float32)
        new = sum_of_codewords(self._model.target_codes[self.known :], self._model.target_codebooks)
        found = torch.cat([self._vectors, new]) @ self._query(user) + self._model.bias
        items, gains = self._model.lifts(self._recent(user))
        scores: NDArray[np.float32] = found.scatter_add(0, items[0], gains[0]).numpy()
        scores[[row for row in range(self.known, len(scores)) if row not in self._has_codes]] = -np.inf
        return scores


def _scores(products: Tensor, codes: NDArray[np.int64], books: Iterable[int]) -> Tensor:
    """What the codes of some books add to the scores: (B', Q, W') -> (Q, 1)."""
    return torch.stack([products[book][:, codes[book]] for book in books]).sum(dim=0)[:, None]


@dataclass
class Answers:
    """Ranks of the test events, ties against the scorer, and how many of the ten best each time were new items."""

    ranks: list[int] = field(default_factory=list)
    new_shown: list[int] = field(default_factory=list)

    def note(self, scores: NDArray[np.floating], target: int, known: int) -> None:
        allowed = np.isfinite(scores[target])
        self.ranks.append(int((scores >= scores[target]).sum()) if allowed else NEVER)
        best = np.argsort(-scores, kind="stable")[:K]
        self.new_shown.append(int((best >= known).sum()))


@torch.inference_mode()
def replayed(trained: Artifact, interactions: Interactions, parts: Split, evidence: Sequence[int]) -> list[Answers]:
    """Answers of the service and of popularity at that moment, in the order of the split's test events."""
    row_of = {name: row for row, name in enumerate(trained.items.ids)}
    new = [name for name in interactions.item_ids if name not in row_of]
    row_of.update((name, len(trained.items) + place) for place, name in enumerate(new))
    rows = np.array([row_of[name] for name in interactions.item_ids])[interactions.item]
    live = Live(trained, len(new), evidence)
    tested = {int(position): place for place, position in enumerate(parts.test)}
    counts = np.zeros(len(row_of))
    by_place: list[tuple[Answers, Answers]] = [(Answers(), Answers()) for _ in tested]
    for position in np.argsort(interactions.timestamp_us, kind="stable").tolist():
        user, row = int(interactions.user[position]), int(rows[position])
        if position in tested:
            service, popular = by_place[tested[position]]
            service.note(live.scores(user), row, live.known)
            popular.note(counts, row, live.known)
        live.receive(user, row)
        counts[row] += 1
    return [
        Answers([one[which].ranks[0] for one in by_place], [one[which].new_shown[0] for one in by_place])
        for which in (0, 1)
    ]


def main(
    data_dir: Annotated[Path, typer.Option("--data", help="Data directory with real times.")],
    plain: Annotated[Path, typer.Option(help="Model of all items.")],
    without: Annotated[Path, typer.Option(help="Model without every tenth item; trained where it is missing.")],
    evidence: Annotated[list[int] | None, typer.Option(help="Events at which codes are voted for.")] = None,
) -> None:
    """Compare."""
    of_all = artifact.load(plain)
    trial = prepare(of_all, data_dir, "temporal", "none")
    interactions, parts = trial.interactions, trial.parts
    if not artifact.exists(without):
        train_without(data_dir, interactions, parts, of_all, without)
    trained = artifact.load(without)
    of_plain = trial.test_model(of_all)
    never, _ = replayed(trained, interactions, parts, ())
    service, popular = replayed(trained, interactions, parts, evidence or EVIDENCE)
    is_new = held_out_items(interactions)[interactions.item[parts.test]]
    new_plain = held_out_items(interactions)[of_plain.recommended[:, :K]].sum(axis=1)  # type: ignore[index]

    table = Table(
        title=f"{cpu()}, {len(is_new):,} test events, {is_new.sum()} of them of {is_new.mean():.1%} new items"
    )
    for name in ("", "HR@10", "NDCG@10", "HR@10, new items", "HR@10, others", "new among the ten"):
        table.add_column(name)
    named = {
        "trained on all items": (of_plain.ranks, new_plain),
        "without every tenth, never learned": (np.array(never.ranks), np.array(never.new_shown)),
        "without, learned from events": (np.array(service.ranks), np.array(service.new_shown)),
        "popularity at that moment": (np.array(popular.ranks), np.array(popular.new_shown)),
    }
    for name, (ranks, shown) in named.items():
        table.add_row(
            name,
            _with_interval(ranks, "hr_at_10"),
            _with_interval(ranks, "ndcg_at_10"),
            _with_interval(ranks[is_new], "hr_at_10"),
            f"{metrics(ranks[~is_new])['hr_at_10']:.3f}",
            f"{shown.mean() / K:.1%}",
        )
    console.print(table)
    learned = named["without, learned from events"][0]
    for name in ("without every tenth, never learned", "trained on all items"):
        others = named[name][0]
        low, high = difference_interval_95(learned, others, "hr_at_10")
        gain = difference(learned, others, "hr_at_10")
        console.print(f"HR@10, learned from events minus {name}: {gain:+.3f} ({low:+.3f} to {high:+.3f})")


def _with_interval(ranks: NDArray[np.int64], metric: str) -> str:
    low, high = interval_95(ranks, metric)
    return f"{metrics(ranks)[metric]:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    typer.run(main)
