"""The service in a process of its own."""

from tests.app.service_process import launch as launch
