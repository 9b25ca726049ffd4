"""Frozen settings of a model, its training and its data; an unknown key is an error."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from operator import eq
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, StringConstraints, field_validator, model_validator
from typing_extensions import override

Protocol = Literal["loo_full", "loo_sampled100", "loo_paper100", "temporal"]
SplitName = Literal["loo", "temporal"]
TrainOn = Literal["train", "validation", "all"]
SeenRule = Literal["none", "recent", "all"]
NegativesChoice = Literal["uniform", "popular"]

# What an event adds to the histogram, by its type. One of weight 0 does not step; positive weights lie in the range.
EVENT_WEIGHTS = {"view": 1.0, "click": 1.0, "cart": 1.0, "purchase": 1.0, "like": 1.0, "dislike": 0.0}
IMPRESSION = "impression"  # of items that were only shown: a type that never steps
WEIGHT_RANGE = (1e-6, 1e6)
# An id is a shop's own, of a user, item, event or order: any text without control characters and halves of surrogate
# pairs. A name is of an event type, scenario, experiment or model. "." and ".." are neither.
ID_PATTERN = r"[ -~\xa0-\ud7ff\ue000-\U0010ffff]{1,128}"
ID_RULE = "1 to 128 characters, not . or .., without control characters"
NAME_PATTERN = r"[A-Za-z0-9_.:@-]{1,128}"
NAME_RULE = "1 to 128 characters of A-Z a-z 0-9 _ . : @ -, not . or .."
EventType = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


# A training's operations take milliseconds, and each ends when its last thread does. With a thread for each core, which
# is PyTorch's own default, each waits for other processes on any of them: benchmarks/quality/training/threads.py.
DEFAULT_THREADS = 1
MAX_LIFT = 1_000.0  # of the strengths that may be chosen, far above any that helps
MAX_SEED = 2**32 - 1  # what torch seeds an epoch with is 100,003 times as large, and has 64 bits


DEFAULT_LIFT_DECAY = 0.7  # where no validation chooses it
RETIRED_SETTINGS = {"lift_choice", "regularisation"}  # of trainings by version 0.2

# A setting that is as in versions before it is not written, so that their models and checkpoints stay the same files.
_is_none, _is_whole, _is_zero, _is_empty, _is_false = (partial(eq, value) for value in (None, 1.0, 0, "", False))


class Frozen(BaseModel):
    """Immutable settings; an unknown key or a number that is not finite is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Frozen):
    """Shape of a model that is served; the letters are those of the dimension legend.

    The bounds lie far beyond useful values; they keep a broken file from exhausting the memory.
    """

    preset: str = "lisa-mini"
    width: int = Field(128, ge=1, le=8192)  # D
    decay_rates: tuple[NonNegativeFloat, ...] = Field(
        (0.02, 0.2, 1.2), min_length=1, max_length=64
    )  # R, lambda per step
    history_codebooks: int = Field(8, ge=1, le=256)  # B
    history_codewords: int = Field(32, ge=2, le=256)  # W
    target_codebooks: int = Field(8, ge=1, le=256)  # B'
    target_codewords: int = Field(256, ge=2, le=256)  # W'
    ffn_multiple: int = Field(4, ge=1, le=64)
    hops: int = Field(1, ge=0, le=64)  # further attention to the histogram, after that by codes
    recent_items: int = Field(5, ge=1, le=1024)  # K, the newest items that a step reads from the state
    recent_heads: int = Field(0, ge=0, le=256)  # 0: their followers are lifted, but no head attends to them
    followers: int = Field(16, ge=0, le=1024)  # K', followers of each item whose scores it lifts
    lift_decay: float = Field(  # of that, a rate: for each newer item of the user's
        DEFAULT_LIFT_DECAY, gt=0, exclude_if=partial(eq, DEFAULT_LIFT_DECAY)
    )
    block: Literal["pre-norm", "post-norm"] = "pre-norm"  # post-norm: the paper's, whose codes were learned
    soft: bool = False  # an item is shares of all history codewords, instead of one of each codebook

    @model_validator(mode="after")
    def _require_post_norm_for_soft_codes(self) -> Self:
        if self.soft and self.block == "pre-norm":
            raise ValueError("soft codes are read by the post-norm block alone")
        return self

    dropout: float = Field(0.2, ge=0, lt=1)


# Of a catalogue that is scanned in almost no time: docs/measurements/experiments.md, "Finer target codes".
FINE_CODEBOOKS, FINE_ITEMS = 16, 20_000


class TrainConfig(Frozen):
    """Settings of a training. A batch has positions of many users' histories."""

    epochs: int = Field(7, ge=1)
    batch_size: int = Field(2048, ge=1)
    learning_rate: float = Field(0.002, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_share: float = Field(0.05, ge=0, lt=1)
    patience: int = Field(2, ge=1)  # epochs without a better NDCG@10 of the served model on validation
    sampled_negatives: int = Field(4096, ge=1)
    full_softmax_items: int = Field(20_000, ge=1)  # catalogues above it train with the sampled softmax
    lift_strength: float | None = Field(None, ge=0)  # None: what validation likes best
    lift_count_decay: float = Field(0.4, ge=0)  # of what counts as following, for each event between
    lift_faint_share: float = Field(0.01, gt=0)  # followers of far smaller shares gain nothing
    seed: int = 0
    events_per_user: int | None = Field(None, ge=2, exclude_if=_is_none)  # that an epoch learns from, at most
    epoch_share: float = Field(1.0, gt=0, le=1, exclude_if=_is_whole)  # of all events: lowers the bound above until so
    negatives: NegativesChoice = Field("uniform", exclude_if=lambda one: one == "uniform")  # of the sampled softmax
    fine_items: int = Field(0, ge=0, exclude_if=_is_zero)  # catalogues up to it get FINE_CODEBOOKS target codebooks
    warm_from: str = Field("", exclude_if=_is_empty)  # the tag of the model whose codes and weights it began with
    warm_count: int = Field(0, ge=0, exclude_if=_is_zero)  # such trainings in a row since one that began afresh
    warm_knows_no_tests: bool = Field(False, exclude_if=_is_false)  # what it began with learned from no held-out event

    @model_validator(mode="before")
    @classmethod
    def _leave_out_retired_settings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in RETIRED_SETTINGS}


# One epoch from the weights of a trained model, at a rate that keeps what it knows, on each user's newest events and as
# many others: benchmarks/quality/training/less_work.py.
WARM_EPOCHS, WARM_LEARNING_RATE, WARM_EPOCH_SHARE = 1, 0.0005, 0.4
FULL_EVERY = 7  # models, of which one is trained afresh: daily trainings make one a week


def warm_training(training: TrainConfig) -> TrainConfig:
    """Return the settings for a warm start from a model that was trained with these settings."""
    changed = {"learning_rate": WARM_LEARNING_RATE, "epoch_share": WARM_EPOCH_SHARE}
    return training.model_copy(update={**changed, "epochs": min(training.epochs, WARM_EPOCHS)})


MechanismName = Literal["softmax", "histograms", "linear", "gated-linear", "interests"]


class MechanismConfig(Frozen):
    """Shape of a model of one of the mechanisms that are compared; see ``model.mechanisms``."""

    preset: str
    mechanism: MechanismName
    width: int = Field(128, ge=1, le=8192)  # D
    window: int = Field(300, ge=1, le=65_536)  # events that are read at most, the newest ones
    dropout: float = Field(0.1, ge=0, lt=1)
    heads: int = Field(1, ge=1, le=256)  # of softmax attention
    memory: int = Field(64, ge=1, le=8192)  # width of what linear attention remembers
    interests: int = Field(16, ge=1, le=8192)  # of LightSANs
    decoupled_positions: bool = False  # of LightSANs
    codebooks: int = Field(8, ge=1, le=256)  # B
    codewords: int = Field(0, ge=0, le=256)  # W; 0: histories are read by the items' own vectors
    soft: bool = False  # codes are shares of all codewords
    target_codebooks: int = Field(8, ge=1, le=256)  # B'
    target_codewords: int = Field(0, ge=0, le=256)  # W'; 0: targets have no codebooks of their own
    quantised_targets: bool = False  # then they are those of the history, or else the items' own vectors
    positions: bool = True  # learned, of the places in the window


class MechanismTraining(Frozen):
    """Settings of a mechanism's training; the defaults are those of the paper, but for the schedule."""

    epochs: int = Field(200, ge=1)
    histories_per_batch: int = Field(128, ge=1)
    loss: Literal["binary", "softmax"] = "binary"  # binary: of the next item and one uniform negative
    sampled_negatives: int = Field(512, ge=1)  # of the softmax, for all positions of a batch
    learning_rate: float = Field(0.001, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_share: float = Field(0.05, ge=0, lt=1)
    codes_learned_share: float = Field(1.0, ge=0, le=1)  # of the epochs; from then on hard codes stay as they are
    patience: int = Field(20, ge=1)
    seed: int = 0


class DataCard(Frozen):
    """What the model was trained on; an evaluation compares it with the data that it is given."""

    sha256: str = ""  # of the uncompressed interactions table
    split: SplitName = "loo"
    train_on: TrainOn = "train"
    seen_rule: SeenRule = "all"
    users: int = 0
    events: int = 0
    events_per_item: float = 0.0  # of those that have any
    since: datetime | None = Field(None, exclude_if=_is_none)  # earlier events teach nothing
    users_sample: float = Field(1.0, gt=0, le=1, exclude_if=_is_whole)  # the share of users whose events teach
    cutoff_us: int | None = Field(None, exclude_if=_is_none)  # of the temporal split, which trains on events before it
    events_before_cutoff: int = Field(0, exclude_if=_is_zero)

    @property
    def event_options(self) -> str:
        """The options that chose the events to learn from, such as ``--train-on train --users-sample 0.5``."""
        since = "" if self.since is None else f" --since {self.since.isoformat()}"
        sample = "" if self.users_sample == 1 else f" --users-sample {self.users_sample:g}"
        return f"--train-on {self.train_on}{since}{sample}"


class Recipe(Frozen):
    """The content of a model directory's ``config.json``."""

    model: ModelConfig | MechanismConfig
    training: TrainConfig | MechanismTraining
    data: DataCard = DataCard()
    event_weights: dict[EventType, float] = EVENT_WEIGHTS
    unseen_types: tuple[EventType, ...] = ()  # events of these types do not make an item seen

    @field_validator("event_weights")
    @classmethod
    def _weights_are_in_range(cls, weights: dict[str, float]) -> dict[str, float]:
        low, high = WEIGHT_RANGE
        for name, weight in weights.items():
            if not (weight == 0 or low <= weight <= high):
                raise ValueError(f"the weight of {name!r} is {weight:g}; it must be 0 or between {low:g} and {high:g}")
        return weights

    def for_catalogue(self, items: int) -> Self:
        """Return the recipe with the shape that a catalogue of so many items gets."""
        return self


class ServedRecipe(Recipe):
    """The recipe of a model that is served, however it was trained."""

    model: ModelConfig = ModelConfig()


class Config(ServedRecipe):
    """The recipe of a served model whose codes are fixed before its training."""

    training: TrainConfig = TrainConfig()

    @override
    def for_catalogue(self, items: int) -> Self:
        books = self.model.target_codebooks
        books = max(books, FINE_CODEBOOKS) if items <= self.training.fine_items else books
        changed = {
            "model": self.model.model_copy(update={"target_codebooks": books}),
            "training": self.training.model_copy(update={"fine_items": 0}),
        }
        return self.model_copy(update=changed)


class MechanismRecipe(Recipe):
    """The recipe of a mechanism that is compared."""

    model: MechanismConfig
    training: MechanismTraining = MechanismTraining()


PRESETS: dict[str, tuple[ModelConfig, TrainConfig]] = {
    "lisa-mini": (ModelConfig(), TrainConfig(fine_items=FINE_ITEMS)),
    "lisa-recent": (
        ModelConfig(preset="lisa-recent", hops=0, recent_items=32, recent_heads=4),
        TrainConfig(fine_items=FINE_ITEMS),
    ),
}


MECHANISMS: dict[str, MechanismConfig] = {
    shape.preset: shape
    for shape in (
        MechanismConfig(
            preset="lisa-base", mechanism="histograms", codewords=128, quantised_targets=True, positions=False
        ),
        MechanismConfig(
            preset="lisa-soft",
            mechanism="histograms",
            codewords=16,
            soft=True,
            target_codewords=256,
            positions=False,
        ),
        MechanismConfig(preset="transformer-paper", mechanism="softmax"),
        MechanismConfig(preset="lisa-base-paper", mechanism="histograms", codewords=128, quantised_targets=True),
        MechanismConfig(preset="lisa-soft-paper", mechanism="histograms", codewords=16, soft=True),
        MechanismConfig(preset="lisa-mini-paper", mechanism="histograms", codewords=32, target_codewords=128),
        MechanismConfig(preset="transformer-codes", mechanism="softmax", codewords=128, quantised_targets=True),
        MechanismConfig(preset="linear", mechanism="linear"),
        MechanismConfig(preset="gated-linear", mechanism="gated-linear"),
        MechanismConfig(preset="lightsans", mechanism="interests"),
        MechanismConfig(preset="lightsans-decoupled", mechanism="interests", decoupled_positions=True),
    )
}

# The mechanisms that are served after their training. The softmax loss learns as much in fewer epochs, and in still
# fewer where the codes are frozen early.
SERVED_MECHANISMS = {"lisa-base", "lisa-soft"}
SERVED_TRAINING = MechanismTraining(
    epochs=20, loss="softmax", histories_per_batch=16, learning_rate=0.002, codes_learned_share=0.2
)


def preset(name: str) -> tuple[ModelConfig, TrainConfig]:
    """Return the named preset; raises ValueError with the known names otherwise."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; valid presets: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
