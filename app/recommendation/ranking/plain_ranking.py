"""Ranks the catalogue for the plain requests of a batch: in arrays for all of them, without a query for each.

The lists are those that the queries would give. `benchmarks/fuzzing/plain_answers.py` compares the bytes of both.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from app.catalogue.model_inputs import ModelInputs
from app.catalogue.trained_catalogue import Rows
from app.events.recommendation_ids import RecommendationIds, hash_of
from app.recommendation.cost import is_plain
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.rankings import MAX_BLENDED_EVENTS
from app.schemas.recommendations import RecommendationRequest, Recommendations
from model.inference import bitmap
from model.inference.captured_batches import States


class PlainRanker:
    """Ranks the catalogue of one generation for users with a personal list."""

    def __init__(self, context: GenerationContext, ids: RecommendationIds, experiment: str) -> None:
        self._name = context.name
        self._generation = context.generation
        self._catalogue = context.catalogue
        self._engine = context.engine
        self._trending = context.trending
        self._ids = ids
        self._experiment, self._experiment_hash = experiment, hash_of(experiment)
        bitmap.with_each(context.catalogue.unavailable, np.empty((0, 0), np.int64))  # compile before the first request

    def rank(
        self, requests: Sequence[RecommendationRequest], states: Mapping[str, bytes], stages_s: dict[str, float]
    ) -> dict[int, Recommendations]:
        """Return the answers to most plain requests, by their positions.

        The others need a query of their own: lists of another length than the first, popular and blended lists, and
        those for which fewer items are allowed than they ask for.

        states    encoded states by user
        stages_s  receives the times of both stages: `step` makes the vectors, `scan` ranks the catalogue
        """
        k = requests[0].k
        places = [place for place, one in enumerate(requests) if one.k == k and one.user_id in states and is_plain(one)]
        if not places or k > self._engine.items:
            return {}
        begin_s = time.perf_counter()
        decoded = self._generation.decode_many([states[str(requests[place].user_id)] for place in places])
        inputs = ModelInputs.of(decoded, self._catalogue)
        is_personal = inputs.last_items >= 0
        if self._trending.has_enough_events:
            is_personal &= inputs.events > MAX_BLENDED_EVENTS
        if not all(is_personal.tolist()):
            personal = np.flatnonzero(is_personal)
            if not len(personal):
                return {}
            places = [places[nth] for nth in personal.tolist()]
            inputs = inputs.of_users(personal)
        of_users = States(inputs.histograms, inputs.last_items, inputs.recent_items)
        unavailable = self._catalogue.unavailable[None]
        ranked = self._engine.rank_states(of_users, k, unavailable, left_out=inputs.seen_items)
        _, (rows, scores), step_s, device_s = ranked
        stages_s["step"] += step_s
        stages_s["scan"] += time.perf_counter() - begin_s - step_s
        if device_s is not None:
            stages_s["device"] = stages_s.get("device", 0.0) + sum(device_s)
        is_full = rows[:, k - 1] >= 0
        found = zip(places, is_full.tolist(), rows, scores.tolist(), strict=True)
        return {
            place: self._answer(requests[place], of_user, its_scores)
            for place, is_whole, of_user, its_scores in found
            if is_whole
        }

    def _answer(self, request: RecommendationRequest, rows: Rows, scores: list[float]) -> Recommendations:
        items = self._catalogue.encoded_items(rows, scores)
        answer: Recommendations = {
            "recommendation_id": self._ids.make(self._generation.tag, self._experiment_hash, items.item_ids),
            "user_id": request.user_id,
            "generation": self._name,
            "source": "personalised",
            "items": items,
        }
        if self._experiment:
            answer["experiment"] = self._experiment
        return answer
