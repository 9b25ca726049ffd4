"""Fixtures for services in their own processes, and for scenarios."""

from tests.app.service_process import launch as launch
from tests.app.serving.scenario_shop import shop as shop
