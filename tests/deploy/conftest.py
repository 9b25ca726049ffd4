"""Fixtures of the app that the tests of the chart use."""

from tests.app.conftest import model_dir

__all__ = ["model_dir"]
