"""Fixtures of the app that the tests of the composed service use."""

from tests.app.conftest import model_dir, start
from tests.docker.shells import alpine_shell

__all__ = ["alpine_shell", "model_dir", "start"]
