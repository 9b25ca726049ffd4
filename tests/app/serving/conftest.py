"""Services in processes of their own, and those of scenarios."""

from tests.app.service_process import launch as launch
from tests.app.serving.scenario_shop import shop as shop
