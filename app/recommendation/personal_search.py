"""Personal search: matching items are ranked by the user's scores, less a penalty for less close matches."""

from functools import partial

from app.catalogue.live_catalogue import LiveCatalogue
from app.recommendation.batching import Requester
from app.recommendation.fair_thread import FairThread
from app.recommendation.recommender import BaseRecommender
from app.schemas.items import FoundItem
from app.schemas.recommendations import PersonalSearch
from model.artifact.word_index import Search


async def find_for_user(
    request: PersonalSearch,
    recommender: BaseRecommender,
    catalogue: LiveCatalogue,
    thread: FairThread,
    requester: Requester,
) -> list[FoundItem]:
    """Return the best matching items, then matching items that no model has learned; at most k.

    thread  searches the items that no model has learned

    raises  as `BaseRecommender.recommend`
    """
    (answer,) = await recommender.recommend([request], requester)
    found = catalogue.items_of([item["item_id"] for item in answer["items"]])
    rest, unlearned = request.k - len(found), len(catalogue.values.other_ids)
    if rest > 0 and unlearned:
        work = partial(catalogue.available_unlearned, Search.of(request.text), rest)
        found += await thread.run(work, unlearned, requester)
    return found
