"""The resources of a training: its device and its memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from mmap import PAGESIZE
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from model.config import Config
from model.data.arrays import IN_MEMORY, Arrays, MappedArrays
from model.data.interactions import Interactions
from model.lisa.item_codes import OVERSAMPLING
from model.training.distributed.processes import ALONE, Processes
from model.training.loop import TrainError

MIB, GIB = 1 << 20, 1 << 30
LIBRARIES = 640 * MIB  # of a process before any training
STEPS = 384 * MIB  # left in memory by the steps of an epoch
POOL = 32_768  # positions whose histograms are in memory together
BYTES_PER_EVENT = 1_024  # of a piece, while its texts are read
BYTES_PER_NAME = 200  # of a user, an item or an order
BYTES_PER_ITEM = 8_192  # for its scores during validation, and its texts while the model is written
SMALLEST_PIECE = 64 * MIB
SCORES_AT_ONCE = 5  # of a batch: the scores, their exponentials and gradients
STATM = Path("/proc/self/statm")  # only Linux has it


@dataclass(frozen=True)
class Resources:
    """The resources of a training.

    memory     the memory limit of each process in bytes; None for no limit, with all events in memory
    processes  this process, as one of those that train together
    """

    device: str = "cpu"
    memory: int | None = None
    processes: Processes = ALONE

    def arrays(self, folder: Path) -> Arrays:
        """Return the creator of event arrays, which are in files of the folder if memory is limited.

        raises  TrainError  when the limit is too small for any training
        """
        if self.memory is None:
            return IN_MEMORY
        taken = max(LIBRARIES, resident_bytes())
        room = self.memory - taken
        if room < SMALLEST_PIECE:
            raise TrainError(
                f"{in_gib(self.memory)} of memory is not enough; use --memory {in_gib(taken + SMALLEST_PIECE)}"
            )
        return MappedArrays(folder, room // 2 // BYTES_PER_EVENT)

    def require_enough(self, interactions: Interactions, config: Config) -> None:
        """Raise TrainError when the model itself, and the names of its data, need more memory."""
        if self.memory is None:
            return
        items, users, orders = (
            len(names) for names in (interactions.item_ids, interactions.user_ids, interactions.order_ids)
        )
        needed = needed_bytes(config, items, users + orders)
        if needed > self.memory:
            raise TrainError(
                f"{in_gib(self.memory)} of memory is not enough for a model of {items:,} items, trained on "
                f"{users:,} users; use --memory {in_gib(needed)}"
            )


UNLIMITED = Resources()


def needed_bytes(config: Config, items: int, others: int) -> int:
    """Estimate the bytes of memory of a training without events in memory.

    others  the number of users and orders, whose ids are in memory
    """
    shape, training = config.model, config.training
    state = 4 * len(shape.decay_rates) * shape.history_codebooks * shape.history_codewords
    all_scored = items <= training.full_softmax_items
    scored = items if all_scored else training.sampled_negatives
    batch = training.batch_size * (SCORES_AT_ONCE * 4 * scored + 3 * state)
    tables = items * (BYTES_PER_ITEM + 4 * 4 * (shape.width + OVERSAMPLING))  # vectors, and their computation
    return LIBRARIES + STEPS + 2 * POOL * state + batch + tables + BYTES_PER_NAME * (items + others)


def resident_bytes() -> int:
    """Return the current memory of this process, in bytes; except on Linux, the most that it had."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * PAGESIZE
    return getrusage(RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def in_gib(size: int) -> str:
    """Return a number of bytes as text, in GiB, rounded up to a tenth."""
    return f"{ceil(10 * size / GIB) / 10:g}GiB"
