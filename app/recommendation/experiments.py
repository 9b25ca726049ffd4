"""A/B experiments: each user gets the recommendations of one generation.

A hash of the user's id decides of which one, so that all processes agree and no choice is stored.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from typing_extensions import override

from app.recommendation.batching import never
from app.recommendation.recommender import BaseRecommender, Recommender
from app.schemas.operations import Experiment
from app.schemas.recommendations import RecommendationRequest, Recommendations, SimilarQuery


def arm_of(experiment: Experiment, user_id: str) -> str:
    """Return the name of the user's generation. An experiment of another name draws independently."""
    names, ends = list(experiment.shares), list(accumulate(experiment.shares.values()))
    drawn = int.from_bytes(blake2b(f"{experiment.name}/{user_id}".encode(), digest_size=6).digest(), "big") / 2**48
    return names[min(bisect_right(ends, drawn * ends[-1]), len(names) - 1)]


class ExperimentRecommender(BaseRecommender):
    """Answers each request by the recommender of its user's arm; requests without a user by the one outside.

    arms     by name
    outside  serves everybody who is in no arm
    """

    def __init__(self, experiment: Experiment, arms: Mapping[str, Recommender], outside: Recommender) -> None:
        self._experiment = experiment
        self._arms = arms
        self._outside = outside

    @override
    async def recommend(
        self, requests: Sequence[RecommendationRequest], is_gone: Callable[[], bool] = never
    ) -> list[Recommendations]:
        places_of: dict[Recommender, list[int]] = {}
        for place, request in enumerate(requests):
            places_of.setdefault(self._recommender_for(request), []).append(place)
        answered = await asyncio.gather(
            *(
                recommender.recommend([requests[place] for place in places], is_gone)
                for recommender, places in places_of.items()
            )
        )
        answers = {
            place: answer
            for places, some in zip(places_of.values(), answered, strict=True)
            for place, answer in zip(places, some, strict=True)
        }
        return [answers[place] for place in range(len(requests))]

    async def similar(self, item_id: str, query: SimilarQuery) -> Recommendations:
        """Return the items that are most like the item, as the recommender outside does."""
        return await self._outside.similar(item_id, query)

    def _recommender_for(self, request: RecommendationRequest) -> Recommender:
        return self._outside if request.user_id is None else self._arms[arm_of(self._experiment, request.user_id)]
