"""Where the Redis store's commands go, and what their failures mean."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from storage.store import StorageError, StorageUnavailable

# RuntimeError is how uvloop says that a connection broke while it was written to; redis-py passes it on.
CONNECTION_ERRORS = (RedisError, OSError, RuntimeError)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except CONNECTION_ERRORS as exc:
        raise failure_of(exc) from exc


def failure_of(cause: Exception) -> StorageError:
    """One for each waiter: a raised exception collects the traceback of who waits."""
    failure: StorageError
    if isinstance(cause, CONNECTION_ERRORS):
        failure = StorageUnavailable(f"Redis failed: {cause}")
    elif isinstance(cause, StorageError):
        failure = type(cause)(str(cause))
    else:
        failure = StorageError(f"the request could not be applied: {cause!r}")
    failure.__cause__ = cause
    return failure
