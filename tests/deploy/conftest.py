"""What the tests of the chart share with those of the service itself."""

from tests.app.conftest import model_dir

__all__ = ["model_dir"]
