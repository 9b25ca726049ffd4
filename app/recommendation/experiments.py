"""A/B experiments: each user gets the recommendations of one generation.

A hash of the user's id decides which one, so that all processes agree and no assignment is stored.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from typing_extensions import override

from app.recommendation.batching import ANYBODY, Requester, Waiter
from app.recommendation.recommender import BaseRecommender, Recommender
from app.schemas.operations import Experiment
from app.schemas.recommendations import RecommendationRequest, Recommendations


def arm_of(experiment: Experiment, user_id: str) -> str:
    """Return the name of the user's generation. Experiments of different names assign users independently.

    The order of the shares makes no difference, because JSON objects have none.
    """
    names = sorted(experiment.shares)
    ends = list(accumulate(experiment.shares[name] for name in names))
    digest = blake2b(f"{experiment.name}/{user_id}".encode(), digest_size=6).digest()
    quantile = int.from_bytes(digest, "big") / 2**48
    return names[min(bisect_right(ends, quantile * ends[-1]), len(names) - 1)]


class ExperimentRecommender(BaseRecommender):
    """Answers each request with the recommender of its user's arm.

    arms     recommenders by generation name
    default  answers requests without a user
    """

    def __init__(self, experiment: Experiment, arms: Mapping[str, Recommender], default: Recommender) -> None:
        self._experiment = experiment
        self._arms = arms
        self._default = default

    @override
    async def recommend(
        self, requests: Sequence[RecommendationRequest], requester: Requester = ANYBODY
    ) -> list[Recommendations]:
        positions_of: dict[Recommender, list[int]] = {}
        for position, request in enumerate(requests):
            positions_of.setdefault(self._recommender_for(request), []).append(position)
        answers_of_arms = await asyncio.gather(
            *(
                recommender.recommend([requests[position] for position in positions], requester)
                for recommender, positions in positions_of.items()
            )
        )
        answers = {
            position: answer
            for positions, arm_answers in zip(positions_of.values(), answers_of_arms, strict=True)
            for position, answer in zip(positions, arm_answers, strict=True)
        }
        return [answers[position] for position in range(len(requests))]

    @override
    def recommend_plain(
        self, request: RecommendationRequest, cost: float, waiter: Waiter[Recommendations], requester: Requester
    ) -> None:
        self._recommender_for(request).recommend_plain(request, cost, waiter, requester)

    @override
    async def similar(
        self, item_id: str, request: RecommendationRequest, requester: Requester = ANYBODY
    ) -> Recommendations:
        return await self._default.similar(item_id, request, requester)

    def _recommender_for(self, request: RecommendationRequest) -> Recommender:
        return self._default if request.user_id is None else self._arms[arm_of(self._experiment, request.user_id)]
