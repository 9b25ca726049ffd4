"""The page of the metrics, made from the instruments of each process."""

from __future__ import annotations

from collections.abc import Iterable

from app.jobs.archive import ArchiverMetrics
from app.jobs.kafka.metrics import ConsumerMetrics, PublisherMetrics
from app.jobs.retraining.metrics import TrainerMetrics
from app.observability.instruments import DeclaredMetric
from app.observability.metrics import Metrics
from website.markdown import code, table

INTRODUCTION = """# Metrics

Every metric of the service and of its jobs, as Prometheus reads them.
This page is made from the instruments in the code by `python -m website`.

A histogram has the series `_bucket`, `_sum` and `_count`.
Labels never hold ids of users, items or keys.
With several workers, a scrape has the sum over all of them, and the counts of a worker that died stay in it.
Series of a model's lists end when the model is dropped, but with several workers only when the service restarts.

[Errors](errors.md#why-the-store-fails) lists the causes of `lisarec_store_errors_total`.
[Monitor](../how-to/operate/monitor.md) says which of these to look at, and the [runbook](../how-to/operate/runbook.md) what to do about each alert.
"""
PARTS = {
    "Service": "`GET /metrics` of each replica, with a key of the scope `metrics:read`, or without one where "
    "`LISAREC_OPEN_METRICS` is `true`.",
    "Archiver": "`lisarec archive --metrics HOST:PORT`.",
    "Trainer": "`lisarec retrain --metrics HOST:PORT`.",
    "Consumer of Kafka": "`lisarec consume --metrics HOST:PORT`.",
    "Publisher to Kafka": "`lisarec publish --metrics HOST:PORT`.",
}
OTHERS = """## Others

| metric | labels | meaning |
|---|---|---|
| `process_...`, `python_gc_...` | `pid`, with several workers | memory, processor time, open files and garbage collection of a process |
| `haproxy_...` | `proxy`, `code` | the load balancer's own, at `LISAREC_METRICS_BIND` |
"""


def page() -> str:
    """Return the page."""
    service = Metrics()
    service.store.set_log_lag(0.0)  # a service without an archive has no such series
    jobs = ArchiverMetrics(), TrainerMetrics(), ConsumerMetrics(), PublisherMetrics()
    declared = [service.declared, *(job.declared for job in jobs)]
    parts = [
        f"## {title}\n\n{where}\n\n{_table(metrics)}\n"
        for (title, where), metrics in zip(PARTS.items(), declared, strict=True)
    ]
    return "\n".join([INTRODUCTION, *parts, OTHERS])


def _table(metrics: Iterable[DeclaredMetric]) -> str:
    rows = [
        [code(one.name), one.kind, ", ".join(map(code, one.labels)), one.documentation.rstrip(".")]
        for one in sorted(metrics)
    ]
    return table(["metric", "type", "labels", "meaning"], rows)
