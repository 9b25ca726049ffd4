"""What the tests of the composed service share with those of the service itself."""

from tests.app.conftest import model_dir, start
from tests.docker.shells import alpine_shell

__all__ = ["alpine_shell", "model_dir", "start"]
