"""The application: `create_app` builds it, `serve` runs it."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypedDict

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.supervisors import Multiprocess

from app.http import openapi
from app.http.connection import listeners
from app.http.error_responses import install_error_handlers
from app.http.middleware.cors import CrossOriginPolicy
from app.http.middleware.fast_path import FastPath
from app.http.middleware.load_shedding import LoadShedding, RequestsInProgress
from app.http.middleware.plain_requests import PlainRequests
from app.http.middleware.request_metrics import RequestRecorder, RequestTimer
from app.http.middleware.request_path import RequestPath
from app.http.protocol import new_connection
from app.http.routes import (
    admin,
    client,
    events,
    health,
    items,
    model,
    playground,
    portable,
    recommendations,
    scenarios,
    users,
)
from app.http.services import Services, open_services
from app.observability import log_format
from app.observability.metrics import Metrics
from app.observability.version import own_version
from app.schemas.operations import ServedModel
from app.serving import empty_model
from app.serving.model_locations import load_models
from app.settings import Settings, is_loopback, share_metrics, shared_metrics

MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
LARGE_BYTES = 1 << 17
WORKER_SILENT_S = 30  # after which a worker is killed: on a busy machine, imports keep one silent for more than 5 s
WAY_OUT = "--port 8001"
IDLE_TIMEOUT_S = 620  # longer than the pools of proxies keep idle connections: 60 s to 600 s, with few exceptions
SWITCH_INTERVAL_S = 0.001  # how long a computing thread may delay each step of the event loop

logger = logging.getLogger(__name__)


class Unprotected(ValueError):
    """Other machines could reach a service without keys; the message says what to do."""


class State(TypedDict):
    """The state that the lifespan gives to every connection and request."""

    services: Services
    plain_requests: PlainRequests


def create_app(settings: Settings) -> FastAPI:
    """Return the service for the settings' model directories; a tenant may have no model until one is activated.

    raises  NoSuchModel, ArtifactError, OSError  when the model of the only tenant cannot be loaded
    """
    loaded = load_models(settings)
    metrics = Metrics(shared_metrics())
    in_progress = RequestsInProgress(settings.max_requests)
    recorder = RequestRecorder(metrics.requests, slow_s=settings.slow_request_s)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[State]:
        async with open_services(settings, loaded, metrics) as services:
            with _draining_on_sigterm(services, settings.drain_s):
                yield {"services": services, "plain_requests": PlainRequests(services, in_progress, recorder)}

    app = Application(
        in_progress,
        recorder,
        title="lisarec",
        version="1",
        description="Real-time recommendations for online shops.",
        lifespan=lifespan,
        openapi_url=None,  # the framework would write the document anew for every request
        # The framework's pages load their scripts from elsewhere; the service works offline.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # it would read the environment for every request
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    resources = [events, recommendations, portable, users, items, model, client, health]
    if settings.keys_file is not None or is_loopback(settings.host):  # nobody else can call them
        resources += [admin, scenarios]
    if settings.playground:
        resources.append(playground)
    for resource in resources:  # an included router would be built anew, at the first request
        app.router.routes.extend(resource.router.routes)
    install_error_handlers(app)
    openapi.describe(app, settings)
    openapi.add_document(app)
    return app


class Application(FastAPI):
    """The framework's app behind the middleware, which answers most requests without the framework."""

    __call__ = Starlette.__call__  # FastAPI's own asks at each request for its telemetry, which is off

    def __init__(self, in_progress: RequestsInProgress, recorder: RequestRecorder, **options: Any) -> None:
        super().__init__(**options)
        self._in_progress = in_progress
        self._recorder = recorder

    @override
    def build_middleware_stack(self) -> ASGIApp:
        answered = FastPath(RequestPath(super().build_middleware_stack()))
        bounded = LoadShedding(answered, self._in_progress)
        return RequestTimer(CrossOriginPolicy(bounded), self._recorder)


def create_worker_app() -> FastAPI:
    """Return the app of one of several worker processes, whose settings are in the environment."""
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    app = create_app(Settings())
    freeze_loaded_objects()
    return app


def _end_with_parent() -> None:
    """Drain, as on SIGTERM, when the parent process is killed: nobody else would end this worker."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then answer the accepted requests and return.

    raises  ArtifactError, StorageError, ValueError  when the model, the store, the device or the port cannot be used
    """
    log_format.configure(settings.log_level, settings.log_format)
    _require_keys_beyond_loopback(settings)
    listeners.require_free(settings.host, settings.port, WAY_OUT)
    # For the time before the server handles signals, and after it shuts down, when it raises the signal again.
    is_terminating = False

    def exit_now(_signum: int, _frame: FrameType | None) -> None:
        nonlocal is_terminating
        is_terminating = True
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, exit_now)
    with rare_garbage_collection():
        app = create_app(settings)
        # Start and stop once, so that a failure is one sentence, and not a traceback from every worker.
        models = asyncio.run(start_and_stop(app))
    freeze_loaded_objects()
    if is_terminating:  # Python ignores what is raised while it runs a destructor
        raise SystemExit(0)
    _warn_without_keys(settings)
    _warn_of_few_files(settings)
    sockets = listeners.bind(settings.host, settings.port, WAY_OUT)
    for line in banner(settings, sockets[0].getsockname()[1], models):
        logger.info("%s", line)
    options: dict[str, Any] = {
        "log_config": log_format.configuration(settings.log_level, settings.log_format),
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing reads a client's address
        "http": new_connection,
        "ws": "none",
        "lifespan": "on",
        "timeout_keep_alive": IDLE_TIMEOUT_S,
        "timeout_graceful_shutdown": settings.shutdown_timeout_s,
        "timeout_worker_healthcheck": WORKER_SILENT_S,
    }
    if settings.workers == 1:
        with contextlib.suppress(KeyboardInterrupt):
            Server(uvicorn.Config(app, **options)).run(sockets)
    else:
        settings.export()
        with TemporaryDirectory(prefix="lisarec-metrics-") as directory:
            share_metrics(Path(directory))
            config = uvicorn.Config(f"{__name__}:create_worker_app", factory=True, workers=settings.workers, **options)
            Workers(config, sockets).run()


class Server(uvicorn.Server):
    """A server that fails if another process listens since `listeners.bind`; uvloop would only close the socket."""

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if any(listener.fileno() < 0 for listener in sockets or ()):
            await self.lifespan.shutdown()
            raise listeners.PortTaken(f"another process has taken the port; choose another port: {WAY_OUT}")


class Workers(Multiprocess):
    """Several worker processes that share listening sockets. This one keeps them open too, to restart workers."""

    @override
    def keep_subprocess_alive(self) -> None:
        """Start another worker for each that has died, and log it as an error: uvicorn does not."""
        before = {worker.pid for worker in self.processes}
        super().keep_subprocess_alive()
        for pid in before.difference(worker.pid for worker in self.processes):
            logger.error("worker process %d has died, and another one is starting", pid)

    @override
    def join_all(self) -> None:
        """Wait for the workers, which have been told to end.

        The last one closes the sockets. While this process held them, the kernel would accept connections that nobody
        answers.
        """
        for listener in self.sockets:
            listener.close()
        super().join_all()


def banner(settings: Settings, port: int, models: Mapping[str, ServedModel]) -> Iterator[str]:
    """Yield the lines that a starting service logs: version, address, keys, store, and the model of each tenant."""
    processes = "one process" if settings.workers == 1 else f"{settings.workers} processes"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    yield f"lisarec {own_version()} on {settings.scheme}://{host}:{port}, {processes}, device {settings.device}"
    keys = "no API keys" if settings.keys_file is None else f"API keys from '{settings.keys_file}'"
    yield f"{keys}; store: {settings.store_name}"
    for tenant, served in models.items():
        if served.tag == empty_model.TAG.hex():
            yield f"tenant {tenant}: no model yet; popular items until a model is active"
        else:
            yield f"tenant {tenant}: model {served.generation} ({served.tag}), {served.items:,} items"


def _require_keys_beyond_loopback(settings: Settings) -> None:
    if settings.keys_file is None and not settings.insecure and not is_loopback(settings.host):
        raise Unprotected(
            f"without API keys, the service listens only on this machine, not on {settings.host}; create a key with "
            "'lisarec keys add --keys FILE' and serve with --keys FILE, or accept all requests with --insecure"
        )


def _warn_without_keys(settings: Settings) -> None:
    if settings.keys_file is not None:
        return
    if is_loopback(settings.host):
        logger.warning("no API keys: only this machine can reach the service, and has full access")
    else:
        logger.warning("no API keys, and --insecure: everyone who can reach %s has full access", settings.host)


def _warn_of_few_files(settings: Settings) -> None:
    files, _ = getrlimit(RLIMIT_NOFILE)
    if files <= settings.max_open_connections and files != RLIM_INFINITY:
        logger.warning(
            "this process may open %d files, too few for %d connections: raise the limit (ulimit -n), or lower "
            "LISAREC_MAX_OPEN_CONNECTIONS",
            files,
            settings.max_open_connections,
        )


@contextlib.contextmanager
def _draining_on_sigterm(services: Services, drain_s: float) -> Iterator[None]:
    """Make the process unready at SIGTERM, and pass the signal on to the server a little later.

    The server stops listening as soon as it gets the signal; a load balancer needs a moment to notice.
    """
    server = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(server):
        yield  # in a test or another program
        return
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _return_freed_memory()
    loop = asyncio.get_running_loop()

    def drain(signum: int, frame: FrameType | None) -> None:
        services.draining = True
        loop.call_soon_threadsafe(loop.call_later, drain_s, server, signum, frame)

    signal.signal(signal.SIGTERM, drain)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, server)


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage more rarely while code compiles: a tenth of the time would go into looking for it."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_loaded_objects() -> None:
    """Let the garbage collector ignore imports: they stay, and scanning them delays a request by 0.2 s.

    Call it while no services are open, because it would also keep replaced generations for ever.
    """
    gc.collect()
    gc.freeze()


def _return_freed_memory() -> None:
    """Let the allocator return large arrays to the system as soon as they are freed.

    glibc stops doing so after a few of them. They then share pages with small objects, and a service under load grows
    by megabytes a minute.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BYTES)


async def start_and_stop(app: FastAPI) -> dict[str, ServedModel]:
    """Start the service without a server, and stop it; return the model of each tenant."""
    models: dict[str, ServedModel] = {}
    async with app.router.lifespan_context(app) as state:
        if state:
            models = {name: service.served_model for name, service in state["services"].by_tenant.items()}
    if state and state["services"].draining:  # told to end meanwhile
        raise SystemExit(0)
    return models
