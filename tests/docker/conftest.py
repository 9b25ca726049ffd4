"""What the tests of the composed service share with those of the service itself."""

from tests.app.conftest import model_dir, start

__all__ = ["model_dir", "start"]
