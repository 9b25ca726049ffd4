"""The version of this program."""

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "of a folder that is not installed"


def own_version() -> str:
    """Return the version that is installed, or words where none is."""
    try:
        return version("lisarec")
    except PackageNotFoundError:
        return UNKNOWN
