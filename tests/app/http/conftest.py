"""The fixture that starts processes."""

from tests.app.service_process import launch

__all__ = ["launch"]
