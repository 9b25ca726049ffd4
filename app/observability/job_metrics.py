"""The metrics of a job, and the server that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client import ProcessCollector, start_http_server

from app.observability.instruments import Instruments


class JobMetrics:
    """The instruments of a job that runs in one process. A job adds its own."""

    def __init__(self) -> None:
        self._instruments = Instruments()
        self.registry, self.declared = self._instruments.registry, self._instruments.declared
        ProcessCollector(registry=self.registry)

    def listen(self, host: str, port: int) -> None:
        """Serve GET /metrics in a separate thread; OSError when the address is not available."""
        start_http_server(port, host, self.registry)
