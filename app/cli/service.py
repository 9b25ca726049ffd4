"""Commands that run the service: serve, demo, bench."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.console import console, say
from app.cli.options import ArchiveDirOption, DataDirOption, Device, JsonOption, RedisUrlOption, service_settings
from app.observability.log_format import LogFormat


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model directory that 'train' wrote; default: none, until one of --models-dir is activated.",
            metavar="DIR|URL",
        ),
    ] = None,
    redis_url: RedisUrlOption = None,
    data_dir: DataDirOption = None,
    archive_dir: ArchiveDirOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any free one.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes.")] = None,
    device: Device | None = None,
    models_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of the models that can be activated; default: where --model is, else models.",
            metavar="DIR|URL",
        ),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="File that 'lisarec keys add' wrote.", metavar="FILE")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let other machines in without keys.", show_default=False)
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="One more shop, and its model; repeatable.", metavar="NAME=DIR|URL")
    ] = None,
    playground: Annotated[
        bool | None, typer.Option("--playground", help="Show users' states at /playground.", show_default=False)
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Lines for people, or one JSON object a line; default: text.")
    ] = None,
) -> None:
    """Serve a model over HTTP. What is not given comes from LISAREC_* in the environment, else from the defaults.

    Without a model events are logged and popular items recommended, until the first model is activated.
    Without keys only this machine reaches the service.
    """
    from app.main import serve as serve_http

    given = {
        "model_dir": model,
        "redis_url": redis_url,
        "data_dir": data_dir,
        "archive_dir": archive_dir,
        "host": host,
        "port": port,
        "workers": workers,
        "device": device,
        "models_dir": models_dir,
        "keys_file": keys,
        "insecure": insecure,
        "tenants": _tenants(tenant) if tenant else None,
        "playground": playground,
        "log_format": log_format,
    }
    serve_http(service_settings(given))


def _tenants(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if not all(name and model for name, _, model in pairs) or len({name for name, _, _ in pairs}) < len(pairs):
        raise typer.BadParameter("give each further tenant once, as --tenant NAME=DIR")
    return {name: model for name, _, model in pairs}


def demo(
    data: Annotated[Path | None, typer.Option(help="Use this instead of the made-up shop.", metavar="DIR")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of 127.0.0.1 to serve on.")] = 8000,
) -> None:
    """Train on a made-up shop, serve it, say what to try."""
    from app.jobs.demo import demo as run_demo

    run_demo(data, port, console)


def bench(
    model: Annotated[
        Path | None, typer.Option(help="Trained model, whose weights and codes are measured.", metavar="DIR")
    ] = None,
    items: Annotated[list[int] | None, typer.Option(min=1, help="Size of the catalogue; repeatable.")] = None,
    codes: Annotated[
        Literal["trained", "random"], typer.Option(help="Codes of those items: like the model's, or without structure.")
    ] = "trained",
    url: Annotated[str | None, typer.Option(help="Measure this service instead; its store keeps the events.")] = None,
    redis: Annotated[bool, typer.Option("--redis", help="On a Redis of its own, not on SQLite.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Of the service, on Redis.")] = 2,
    rate: Annotated[float, typer.Option(min=1, help="Recommendations per second to begin with.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=1, help="At each rate.")] = 10.0,
    p90_ms: Annotated[float, typer.Option(min=0.1, help="What it has to keep up with.")] = 7.0,
    json_file: JsonOption = None,
) -> None:
    """Raise the rate of requests until the service no longer keeps up; service and load share this machine."""
    from app.jobs.loadtest.rate_sweep import RateSweep, as_json, disk_sync_ms, enlarged_service, running_target
    from app.jobs.loadtest.table import bench_table

    if (model is None) == (url is None):
        raise typer.BadParameter("give either a model with --model DIR or a running service with --url URL")
    rows_by_name = {}
    for size in [0] if model is None else items or [100_000]:
        name = str(url) if model is None else f"{size:,} items, {codes} codes"
        with ExitStack() as stack:
            with console.status(f"{name}: starting"):
                running = (
                    running_target(str(url))
                    if model is None
                    else stack.enter_context(
                        enlarged_service(model, size, codes, processes if redis else 1, on_redis=redis)
                    )
                )
                measured = RateSweep(running)
            stack.callback(measured.close)
            rows = []
            for row in measured.until_overloaded(rate, seconds, p90_ms):
                rows.append(row)
                say(f"{name}: {row.recommendations_per_s:,.0f} recommendations/s, p90 {row.p90_ms:.1f} ms")
        rows_by_name[name] = as_json(rows)
        console.print(bench_table(name, rows, p90_ms))
    if model is not None:
        say("this disk syncs 4 kB in {:.1f} ms (90th percentile {:.1f} ms)".format(*disk_sync_ms()))
    if json_file is not None:
        json_file.write_text(json.dumps(rows_by_name, indent=2) + "\n", encoding="utf-8")
