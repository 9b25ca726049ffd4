"""The ways in which a store can fail or refuse."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

FailureCause = Literal[
    "unreachable",  # nobody answers at the address
    "timeout",  # no answer in time
    "loading",  # Redis starts and reads its data back
    "refused",  # the user, the password or the permission to use a command or file
    "read_only",  # a replica, or a file that may not be written
    "memory_full",  # Redis's maxmemory
    "disk_full",
    "disk_error",  # the disk fails in another way
    "locked",  # another program holds the file
    "damaged",  # the data cannot be read as what they should be
    "wrong_store",  # other data than those that were acknowledged
    "unsafe",  # Redis without an append-only file, or one that evicts
    "too_few_replicas",  # have confirmed a write
    "archive",  # it is needed and cannot be read
    "contention",  # others were always faster with changes of the same user
    "busy",  # too much waits
    "closed",  # by this process, which ends
    "failed",  # anything else; the log says what
]
FAILURE_CAUSES: tuple[FailureCause, ...] = get_args(FailureCause)


class StorageError(Exception):
    """A request could not be applied. Nothing of it was.

    failure_cause  why, as operators have to know it; the message says it in full, and never goes to a client
    """

    def __init__(self, message: str, failure_cause: FailureCause = "failed") -> None:
        super().__init__(message)
        self.failure_cause = failure_cause

    def __copy__(self) -> "StorageError":
        """Return the same without a traceback; an exception's own way calls its constructor with the message alone."""
        copied = type(self).__new__(type(self), *self.args)
        copied.__dict__.update(self.__dict__)
        return copied


class StorageUnavailable(StorageError):
    """The store cannot be reached or written, or is closed.

    What was sent may be sent again: event ids make that safe.
    """


class PartlyApplied(StorageUnavailable):
    """Some events of a request are durable; of the others it is not known. Send all of them again.

    results  the AppendResult of each durable event, by its position in the request
    """

    def __init__(self, failure: StorageError, results: Mapping[int, Any]) -> None:
        super().__init__(f"{failure}; {len(results)} events were applied", failure.failure_cause)
        self.failure = failure
        self.results = results


class PartlyRead(StorageUnavailable):
    """Only the values of the users in `values` can be read now."""

    def __init__(self, failure: StorageError, values: Mapping[str, bytes | None]) -> None:
        super().__init__(str(failure), failure.failure_cause)
        self.values = values


class StorageBusy(StorageError):
    """Too many reads or writes wait. The store accepted nothing; try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "busy")


class PropertyRefused(StorageError):
    """A property has values of another type, or the tenant has as many properties as it may have. Nothing changed.

    held  the type that the property has; None when it is one too many
    """

    def __init__(self, name: str, given: str, held: str | None) -> None:
        known = f"is a {held}" if held else "exceeds the maximum number of properties"
        super().__init__(f"{name} {known}, and cannot be a {given}")
        self.name = name
        self.given = given
        self.held = held


class VectorRefused(StorageError):
    """A vector has more or fewer numbers than those of the tenant's other items. Nothing changed."""

    def __init__(self, given: int, held: int) -> None:
        super().__init__(f"the items' vectors have {held:,} numbers each, but this one has {given:,}")
        self.given = given
        self.held = held


class UnknownEvent(Exception):
    """There is nothing to undo: the user's log has no event of this id. Nothing changed."""


class MergeRefused(Exception):
    """The visitor cannot become the user; the message says why. Nothing changed."""


class MergeTooLarge(MergeRefused):
    """The visitor's log has more than MAX_MERGED entries."""
