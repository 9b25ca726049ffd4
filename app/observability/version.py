"""The version of this program."""

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "of a folder that is not installed"


def own_version() -> str:
    """Return the installed version, or UNKNOWN if lisarec is not installed."""
    try:
        return version("lisarec")
    except PackageNotFoundError:
        return UNKNOWN
