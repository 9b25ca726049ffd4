"""Commands that run the service or an interface to it: serve, demo, mcp, bench."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.console import console, print_table, say
from app.cli.options import (
    DataOptions,
    Device,
    JsonOption,
    LogOptions,
    MappingOptions,
    OptionalDataOption,
    TenantsOption,
    UrlOption,
    models_of_tenants,
    read_key,
    service_settings,
    write_json,
)
from app.observability.log_format import LogFormat, configure

if TYPE_CHECKING:
    from app.jobs.loadtest.rate_sweep import BenchTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessOptions:
    """Options for the address and the device."""

    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None
    port: Annotated[int | None, typer.Option(help="Port to listen on. 0 chooses a free port. Default: 8000.")] = None
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: 1.")] = None
    device: Annotated[Device | None, typer.Option(help="Device that ranks items. Default: cpu.")] = None
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file of a certificate, to serve HTTPS.", metavar="FILE")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key, without passphrase.", metavar="FILE")] = (
        None
    )


@dataclass(frozen=True)
class AccessOptions:
    """Options for access and tenants."""

    keys_file: Annotated[
        Path | None,
        typer.Option("--keys", help="File of the API keys, written by 'lisarec keys add'.", metavar="FILE"),
    ] = None
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Accept requests from other machines without API keys. Insecure.", show_default=False
        ),
    ] = None
    tenant: TenantsOption = None

    def settings(self) -> dict[str, object]:
        """Return the options as settings."""
        tenants = models_of_tenants(self.tenant) if self.tenant else None
        return {"keys_file": self.keys_file, "insecure": self.insecure, "tenants": tenants}


def serve(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model directory, written by 'lisarec train'. Default: the active model, if there is one.",
            metavar="DIR|URL",
        ),
    ] = None,
    log: LogOptions,
    processes: ProcessOptions,
    models_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of models that can be activated. Default: the folder of --model, else models.",
            metavar="DIR|URL",
        ),
    ] = None,
    access: AccessOptions,
    playground: Annotated[
        bool | None,
        typer.Option(
            "--playground", help="Serve the playground at /playground. It shows users' states.", show_default=False
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Log format: text, or one JSON object per line. Default: text.")
    ] = None,
) -> None:
    """Serve a model over HTTP.

    Missing options come from the environment (LISAREC_...), then from the defaults. Without API keys, only this
    machine can reach the service. Until the first model is active, the service logs events and recommends
    popular items.
    """
    settings = service_settings(
        **vars(log),
        **vars(processes),
        **access.settings(),
        model_dir=model,
        models_dir=models_dir,
        playground=playground,
        log_format=log_format,
    )
    configure(settings.log_level, settings.log_format)
    loaded = "the active model, if any" if settings.model_dir is None else settings.model_dir
    logger.info("loading %s; the first start compiles code, which takes a minute or more", loaded)
    from app.main import serve as serve_http  # takes seconds

    serve_http(settings)


def demo(
    mapping: MappingOptions,
    data: OptionalDataOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on at 127.0.0.1.")] = 8000,
) -> None:
    """Train on a small generated shop, serve it, and print requests to try."""
    from app.jobs.demo import demo as run_demo

    if data is None and mapping != MappingOptions():
        raise typer.BadParameter("options such as --columns describe a shop's tables; pass these with --data")
    run_demo(None if data is None else DataOptions(**vars(mapping), data=data).directory(), port, console)


def mcp(
    url: UrlOption = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with a key of the scope recs:read, if the service has keys.", metavar="FILE"),
    ] = None,
    allow_events: Annotated[
        bool,
        typer.Option(
            "--allow-events",
            help="Also allow assistants to log events. The key then also needs the scope events:write.",
        ),
    ] = False,
) -> None:
    """Run a Model Context Protocol server on standard input and output, so that AI assistants can query a service.

    It offers search, recommendations, explanations, similar items and statistics. By default it is read-only.
    """
    from app.observability.version import own_version
    from clients.lisarec_client import LisarecError
    from clients.lisarec_client.mcp_server import serve as serve_mcp

    key = read_key(key_file)
    try:
        serve_mcp(url, key, version=own_version(), allow_events=allow_events)
    except ImportError:
        raise ValueError("the Model Context Protocol SDK is not installed; run: pip install 'lisarec[mcp]'") from None
    except LisarecError as exc:
        raise ValueError(str(exc)) from None


@dataclass(frozen=True)
class TargetOptions:
    """Options that name what to measure."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="Model whose weights to measure, with a synthetic catalogue in place of its own.", metavar="DIR"
        ),
    ] = None
    items: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Size of the synthetic catalogue, in items; 100,000 if not given. Repeatable."),
    ] = None
    codes: Annotated[
        Literal["trained", "random"], typer.Option(help="Codes of the synthetic items: like the model's, or random.")
    ] = "trained"
    url: Annotated[
        str | None,
        typer.Option(
            help="Running service to measure, with its own catalogue. The events of the test stay in its store."
        ),
    ] = None
    redis: Annotated[
        bool, typer.Option("--redis", help="Start a Redis for the measurement, instead of using SQLite.")
    ] = False
    processes: Annotated[int, typer.Option(min=1, help="Number of service processes, with --redis.")] = 2

    def started(self) -> Iterator[tuple[str, AbstractContextManager[BenchTarget]]]:
        """Yield each target's name and a context that starts it. Raise BadParameter if there is no target."""
        from app.jobs.loadtest.rate_sweep import enlarged_service, running_target
        from app.jobs.replay import ServiceAddress

        if self.url is not None and self.model is None:
            address = ServiceAddress.of(self.url)
            yield address.url, nullcontext(running_target(address))
        elif self.model is not None and self.url is None:
            for size in self.items or [100_000]:
                processes = self.processes if self.redis else 1
                service = enlarged_service(self.model, size, self.codes, processes, on_redis=self.redis)
                yield f"{size:,} items, {self.codes} codes", service
        else:
            raise typer.BadParameter("pass either a model as --model DIR or a running service as --url URL")


@dataclass(frozen=True)
class LoadOptions:
    """Options for the request rates and the latency goal."""

    rate: Annotated[float, typer.Option(min=1, help="Initial rate, in recommendations per second.")] = 500.0
    seconds: Annotated[float, typer.Option(min=1, help="Duration of each rate, in seconds.")] = 10.0
    p90_ms: Annotated[float, typer.Option(min=0.1, help="Latency goal: 90th percentile, in milliseconds.")] = 7.0


def bench(target: TargetOptions, load: LoadOptions, json_file: JsonOption = None) -> None:
    """Raise the request rate until the service exceeds the latency goal. The load runs on the same machine."""
    from app.jobs.loadtest.rate_sweep import RateSweep, disk_sync_ms
    from app.jobs.loadtest.table import bench_table

    rows_by_name = {}
    for name, service in target.started():
        with ExitStack() as stack:
            with console.status(f"{name}: starting"):
                measured = RateSweep(stack.enter_context(service))
            stack.callback(measured.close)
            rows = []
            for row in measured.until_overloaded(load.rate, load.seconds, load.p90_ms):
                rows.append(row)
                say(f"{name}: {row.recommendations_per_s:,.0f} recommendations/s, p90 {row.p90_ms:.1f} ms")
        rows_by_name[name] = [asdict(row) for row in rows]
        print_table(bench_table(name, rows, load.p90_ms))
    if target.model is not None:
        say("this disk syncs 4 kB in {:.1f} ms (90th percentile {:.1f} ms)".format(*disk_sync_ms()))
    write_json(json_file, rows_by_name)
