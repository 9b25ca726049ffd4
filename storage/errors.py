"""The ways in which a store can fail or refuse."""

from collections.abc import Mapping, Sequence


class StorageError(Exception):
    """A request could not be applied. Nothing of it was."""


class StorageUnavailable(StorageError):
    """The store cannot be reached or written, or is closed.

    What was sent may be sent again: event ids make that safe.
    """


class PartlyApplied(StorageUnavailable):
    """The events at the positions `applied` are durable; of the others it is not known. Send all of them again."""

    def __init__(self, message: str, applied: Sequence[int]) -> None:
        super().__init__(f"{message}; {len(applied)} events were applied")
        self.applied = tuple(applied)


class PartlyRead(StorageUnavailable):
    """Only the values of the users in `values` can be read now."""

    def __init__(self, message: str, values: Mapping[str, bytes | None]) -> None:
        super().__init__(message)
        self.values = values


class StorageBusy(StorageError):
    """Too many reads or writes wait. The store accepted nothing; try again later."""


class UnknownEvent(Exception):
    """There is nothing to undo: the user's log has no event of this id. Nothing changed."""


class MergeRefused(Exception):
    """The visitor cannot become the user; the message says why. Nothing changed."""


class MergeTooLarge(MergeRefused):
    """The visitor's log has more than MAX_MERGED entries."""
