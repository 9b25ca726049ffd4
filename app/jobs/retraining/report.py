"""The trainer's report: the outcome of its last round, and the models that it has made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from app.jobs.retraining.gate import Criterion
from storage.folders.folder import Folder

WORK, ROUND, REPORT, LOCK = ".retraining", "round.json", "retrain.json", ".retraining.lock"


@dataclass(frozen=True)
class RoundOutcome:
    """The outcome of a round. The metrics are those of the new model, and of the served one or of popular items.

    served         tag of the model that was served when the round began
    questions      the number of held-out events in the comparison
    valued_events  the number of these events with a value; if there are none, the metrics of value are None
    decided_by     the metric that decided; None if nothing was compared
    is_warm        whether the new model continued from the served one; None if there is no new model
    phases_s       seconds of each phase of the round, in the process that ended it
    peak_bytes     the peak memory of this process
    """

    outcome: Literal["activated", "refused", "waiting"]
    reason: str
    at: str
    name: str | None = None
    served: str | None = None
    events: int = 0
    questions: int = 0
    ndcg_at_10: float | None = None
    served_ndcg_at_10: float | None = None
    difference_interval_95: tuple[float, float] | None = None
    valued_events: int = 0
    value_hr_at_10: float | None = None
    served_value_hr_at_10: float | None = None
    value_difference_interval_95: tuple[float, float] | None = None
    decided_by: Criterion | None = None
    seconds: float = 0.0
    is_warm: bool | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0


@dataclass(frozen=True)
class TrainerReport:
    """The content of retrain.json: the last outcome, the model served before it, and all models that were made."""

    last: dict[str, Any] | None = None
    previous: str | None = None
    made: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Folder) -> TrainerReport:
        """Return the report of the models folder; an empty one if there is none.

        raises  ValueError  when the file is not a report
                OSError     when it cannot be read
        """
        try:
            found = folder.read(REPORT)
            saved = json.loads(found.data if found else b"")
            return cls(saved["last"], saved["previous"], tuple(saved["made"]))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, KeyError) as exc:
            raise ValueError(f"'{folder}/{REPORT}' is not a report of the trainer; move it elsewhere") from exc

    def write(self, folder: Folder) -> None:
        """Write the report into the models folder."""
        folder.add(REPORT, (json.dumps(asdict(self), indent=2) + "\n").encode())
