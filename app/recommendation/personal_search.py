"""Personal search: matching items are ranked by the user's scores, less a penalty for less close matches."""

from functools import partial

from app.catalogue.live_catalogue import LiveCatalogue
from app.recommendation.batching import Requester
from app.recommendation.fair_thread import FairThread
from app.recommendation.recommender import BaseRecommender
from app.schemas.items import FoundItem
from app.schemas.recommendations import PersonalSearch, Recommendations
from model.artifact.word_index import Search

FEW_ITEMS = 50  # described within a quarter of a millisecond
ITEM_COST = 100.0  # of describing an item, where comparing a title with a word costs 1


async def find_for_user(
    request: PersonalSearch,
    recommender: BaseRecommender,
    catalogue: LiveCatalogue,
    thread: FairThread,
    requester: Requester,
) -> list[FoundItem]:
    """Return the best matching items, then matching items that no model has learned; at most k.

    thread  describes many items, and searches those that no model has learned

    raises  as `BaseRecommender.recommend`
    """
    (answer,) = await recommender.recommend([request], requester)
    describe = partial(_items_in, answer, catalogue)
    is_short = request.k <= FEW_ITEMS
    found = describe() if is_short else await thread.run(describe, ITEM_COST * request.k, requester)
    rest, unlearned = request.k - len(found), len(catalogue.values.other_ids)
    if rest > 0 and unlearned:
        work = partial(catalogue.available_unlearned, Search.of(request.text), rest)
        found += await thread.run(work, unlearned, requester)
    return found


def _items_in(answer: Recommendations, catalogue: LiveCatalogue) -> list[FoundItem]:
    return catalogue.items_of([item["item_id"] for item in answer["items"]])
