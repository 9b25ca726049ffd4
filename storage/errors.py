"""The ways in which a store can fail or refuse."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

FailureCause = Literal[
    "unreachable",  # no server answers at the address
    "timeout",  # no answer in time
    "loading",  # Redis is starting and loads its data
    "refused",  # the user, the password or the permission to use a command or file
    "read_only",  # a replica, or a file that may not be written
    "memory_full",  # Redis's maxmemory
    "disk_full",
    "disk_error",  # the disk fails in another way
    "locked",  # another program holds the file
    "damaged",  # the data are corrupt
    "wrong_store",  # the data are not those that were acknowledged
    "unsafe",  # Redis without an append-only file, or one that evicts
    "too_few_replicas",  # Redis lacks replicas that it must write to, and has refused the write
    "unconfirmed",  # Redis has the write, but fewer replicas than required have confirmed it
    "archive",  # an archive is needed, but cannot be read
    "contention",  # every attempt lost to another change of the same user
    "busy",  # too many requests are queued
    "closed",  # by this process, which is ending
    "failed",  # anything else; the log says what
]
FAILURE_CAUSES: tuple[FailureCause, ...] = get_args(FailureCause)


class StorageError(Exception):
    """A request could not be applied. Unless a subclass says otherwise, no part of it was.

    failure_cause  the kind of failure, for operators. The message has the details, and is never sent to a client
    """

    def __init__(self, message: str, failure_cause: FailureCause = "failed") -> None:
        super().__init__(message)
        self.failure_cause = failure_cause

    def __copy__(self) -> "StorageError":
        """Return a copy without the traceback. The default copy would call the constructor with only the message."""
        copied = type(self).__new__(type(self), *self.args)
        copied.__dict__.update(self.__dict__)
        return copied


class StorageUnavailable(StorageError):
    """The store cannot be reached or written, or is closed.

    Whether the request was applied is unknown. Send it again: event ids make that safe.
    """


class StoreUnused(StorageUnavailable):
    """No service has used the store yet. Nothing was read or written."""


class PartlyApplied(StorageUnavailable):
    """Some events of a request are durable; whether the others are is unknown. Send all of them again.

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
    """Too many reads or writes are queued, or the user is being erased. Nothing was accepted; try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "busy")


class PropertyRefused(StorageError):
    """A value has another type than its property, or the tenant would have too many properties. Nothing changed.

    held  the property's type; None when there would be too many properties
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
    """The visitor cannot be merged into the user; the message says why. Nothing changed."""


class MergeTooLarge(MergeRefused):
    """The visitor's log has more than MAX_MERGED entries."""
