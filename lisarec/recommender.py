"""A model that is asked for lists, in this process and without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

from lisarec.wishes import Wishes, request_fields

if TYPE_CHECKING:
    from app.schemas.items import FoundItem
    from app.schemas.recommendations import RecommendationRequest
    from app.schemas.scored_items import ScoredItem
    from lisarec.local_service import LocalService


class Recommender:
    """A trained model. `load` makes one; close it, or use it in a `with`, to give its threads back.

    Any thread may use it.
    """

    def __init__(self, service: LocalService) -> None:
        self._service = service

    def recommend(self, history: Sequence[str], k: int = 10, **wishes: Unpack[Wishes]) -> list[ScoredItem]:
        """Return the k best items for a history, best first; popular ones for an empty history.

        history  ids of items, oldest first; those that the model does not know are passed over
        k        how many items; fewer where fewer are allowed
        wishes   what else the list has to keep to, as `categories`, `exclude` or `filter`

        raises   ValueError  when a wish cannot be
        """
        return self.recommend_many([history], k, **wishes)[0]

    def recommend_many(
        self, histories: Sequence[Sequence[str]], k: int = 10, **wishes: Unpack[Wishes]
    ) -> list[list[ScoredItem]]:
        """Return a list for each history, as `recommend` does, and sooner than one by one."""
        return self._lists([request_fields(history, k, wishes) for history in histories])

    def explain(self, history: Sequence[str], k: int = 10, **wishes: Unpack[Wishes]) -> list[ScoredItem]:
        """Return the same list; the `explanation` of each item has the parts that add up to its score."""
        return self._lists([request_fields(history, k, wishes, explain=True)])[0]

    def similar(self, item_id: str, k: int = 10) -> list[ScoredItem]:
        """Return the items that are most like an item.

        raises  ValueError  when the model does not know it
        """
        return cast("list[ScoredItem]", self._service.similar(item_id, self._request(request_fields([], k, {}))))

    def search(self, query: str, limit: int = 20) -> list[FoundItem]:
        """Return the items whose titles or ids match, the closest first."""
        return self._service.catalogue.search(query, limit)

    def __contains__(self, item_id: object) -> bool:
        """Return whether the model knows an item."""
        return item_id in self._service.catalogue.row_of

    def __len__(self) -> int:
        """Return how many items the model knows."""
        return len(self._service.catalogue)

    @property
    def description(self) -> dict[str, Any]:
        """The model: its name and tag, its configuration, and how it measured in training."""
        return self._service.description

    def close(self) -> None:
        """Stop the threads of this recommender."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Recommender {self.description['generation']!r}, {len(self):,} items>"

    def _lists(self, bodies: Sequence[dict[str, object]]) -> list[list[ScoredItem]]:
        answers = self._service.recommend([self._request(body) for body in bodies])
        return cast("list[list[ScoredItem]]", answers)

    def _request(self, body: dict[str, object]) -> RecommendationRequest:
        from app.errors import InvalidRequest, validate
        from app.schemas.recommendations import RecommendationRequest
        from lisarec.local_service import as_value_error

        try:
            return validate(RecommendationRequest, body, "the request is not valid")
        except InvalidRequest as exc:
            raise as_value_error(exc) from None


def load(path: str | Path, *, device: Literal["cpu", "cuda"] = "cpu") -> Recommender:
    """Load a model directory that `train` or `lisarec train` has written.

    raises  ValueError  when there is none, or it cannot be used
    """
    from app.settings import Settings
    from lisarec.local_service import LocalService
    from model.artifact import model_directory

    artifact = model_directory.load(Path(path))
    directory = Path(mkdtemp(prefix="lisarec-"))
    # whatever the environment says, which is for a service
    settings = Settings(
        model_dir=Path(path),
        models_dir=None,
        data_dir=directory,
        redis_url=None,
        archive_dir=None,
        keys_file=None,
        seal_keys_file=None,
        tenants={},
        device=device,
        insecure=False,
        workers=1,
    )
    return Recommender(LocalService(artifact, settings, directory))
