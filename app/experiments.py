"""A/B: which users get the recommendations of which generation, by a hash of their id: everywhere and always alike."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from app.batching import never
from app.recommend import Recommender, Recommending
from app.schemas.operations import Experiment
from app.schemas.recommendations import RecommendationRequest, Recommendations, SimilarQuery


def arm_of(experiment: Experiment, user_id: str) -> str:
    """The name of the user's generation. Another experiment's name mixes users anew."""
    names, ends = list(experiment.shares), list(accumulate(experiment.shares.values()))
    drawn = int.from_bytes(blake2b(f"{experiment.name}/{user_id}".encode(), digest_size=6).digest(), "big") / 2**48
    return names[min(bisect_right(ends, drawn * ends[-1]), len(names) - 1)]


class Split(Recommending):
    """Recommends as a `Recommender` does, to each user by the one of their arm; without a user, outside of it."""

    def __init__(self, experiment: Experiment, arms: Mapping[str, Recommender], outside: Recommender) -> None:
        self._experiment = experiment
        self._arms = arms
        self._outside = outside

    async def recommend(
        self, requests: Sequence[RecommendationRequest], is_gone: Callable[[], bool] = never
    ) -> list[Recommendations]:
        """As `Recommender.recommend`."""
        theirs = [self._of(request) for request in requests]
        if len(set(theirs)) == 1:
            return await theirs[0].recommend(requests, is_gone)
        together = {one: [place for place, own in enumerate(theirs) if own is one] for one in dict.fromkeys(theirs)}
        found = await asyncio.gather(
            *(one.recommend([requests[place] for place in own], is_gone) for one, own in together.items())
        )
        answers = {
            place: answer
            for own, some in zip(together.values(), found, strict=True)
            for place, answer in zip(own, some, strict=True)
        }
        return [answers[place] for place in range(len(requests))]

    async def similar(self, item_id: str, query: SimilarQuery) -> Recommendations:
        return await self._outside.similar(item_id, query)

    def _of(self, request: RecommendationRequest) -> Recommender:
        return self._outside if request.user_id is None else self._arms[arm_of(self._experiment, request.user_id)]
