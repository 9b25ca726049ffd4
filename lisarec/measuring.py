"""The evaluation of models from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

from pydantic import Field

from lisarec.tables import TableSettings, checked, directory_of, is_of_a_table
from model.config import DEFAULT_THREADS, Protocol, SeenRule


class EvaluationSettings(TableSettings, total=False):
    """Settings of an evaluation.

    protocol   default: the protocol of the first model's split
    seen       the seen items to exclude; default: the rule that the model was selected with
    threads    number of CPU threads
    """

    protocol: Protocol
    seen: SeenRule
    threads: Annotated[int, Field(ge=1)]


def evaluate(
    models: str | Path | Sequence[str | Path], data: str | Path, **settings: Unpack[EvaluationSettings]
) -> dict[str, Any]:
    """Measure models on the events that were held out of their data; the first is compared with the others.

    returns  what `lisarec evaluate --json` writes: `metrics`, `protocol`, and how others compare
    raises   ValueError  when a model has seen the held-out events, or another table
    """
    from model.evaluation.evaluate import evaluate as evaluate_models
    from model.evaluation.evaluate import load_model
    from model.training.threads import threads_kept, use_threads

    directories = [models] if isinstance(models, str | Path) else models
    given = checked(settings, EvaluationSettings)
    table = {name: value for name, value in given.items() if is_of_a_table(name)}
    with threads_kept(), directory_of(Path(data), table) as directory:
        use_threads(given.get("threads", DEFAULT_THREADS))
        loaded = [load_model(Path(model)) for model in directories]
        report = evaluate_models(loaded, directory, given.get("protocol"), given.get("seen"))
        return report.to_json()
