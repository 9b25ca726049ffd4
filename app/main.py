"""The application: `create_app` puts it together, `serve` runs it."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypedDict

import uvicorn
from fastapi import Depends, FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.supervisors import Multiprocess

from app import logs, no_model, openapi
from app.connections import Connection
from app.cross_origin import CrossOrigin
from app.dependencies import no_encoded_slash, only_known_lists_repeat
from app.direct import Direct
from app.error_responses import install_error_handlers
from app.http_state import Services, running
from app.metrics import Metrics
from app.overload import RequestBound
from app.request_metrics import RequestTimer
from app.routes import admin, client, events, health, items, model, playground, recommendations, users
from app.settings import Settings, is_loopback, share_metrics, shared_metrics
from model import artifact

MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
LARGE_BYTES = 1 << 17

logger = logging.getLogger(__name__)


class PortTaken(ValueError):
    """Nothing can listen there; the message says what to do."""


class Unprotected(ValueError):
    """Others could reach a service without keys; the message says what to do."""


class State(TypedDict):
    """What the lifespan hands to every request."""

    services: Services


def create_app(settings: Settings) -> FastAPI:
    """The service over the model directory of the settings, or without a model until one is activated.

    raises  ArtifactError  when the model directory cannot be used
    """
    loaded = {
        tenant: no_model.artifact() if model_dir is None else artifact.load(model_dir)
        for tenant, model_dir in settings.model_dirs.items()
    }
    metrics = Metrics(shared_metrics())

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[State]:
        async with running(settings, loaded, metrics) as services:
            with _as_the_server(services, settings.drain_s):
                yield {"services": services}

    app = Application(
        settings,
        metrics,
        title="lisarec",
        version="1",
        description="Online recommendations from constant-size user states.",
        lifespan=lifespan,
        # The framework's pages load their scripts from elsewhere; the service works offline.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # it looks into the environment for every request
        telemetry={"tracing": False, "metrics": False, "logs": False},
        dependencies=[Depends(only_known_lists_repeat), Depends(no_encoded_slash)],
        responses=openapi.errors(401, 403, 422, 429, 431, 503),
    )
    for routes in (events, recommendations, users, items, model, client, health):
        app.include_router(routes.router)
    if settings.keys_file is not None or is_loopback(settings.host):  # something keeps others out
        app.include_router(admin.router)
    if settings.playground:
        app.include_router(playground.router)
    install_error_handlers(app)
    openapi.describe_keys(app, settings)
    return app


class Application(FastAPI):
    """The framework's app behind what looks at every request first, and answers most of them without it."""

    def __init__(self, settings: Settings, metrics: Metrics, **options: Any) -> None:
        super().__init__(**options)
        bound = RequestBound(Direct(super().__call__), at_most=settings.max_requests)
        timed = RequestTimer(CrossOrigin(bound), metrics=metrics.requests, slow_s=settings.slow_request_s)
        self._entrance = CloseWhenDraining(timed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entrance(scope, receive, send)


def create_worker_app() -> FastAPI:
    """The app of one of several worker processes, which find their settings in the environment."""
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    return create_app(Settings())


def _end_with_parent() -> None:
    """Nobody would ever end a worker whose parent was killed; so it drains then, as on any SIGTERM."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then answer what was accepted and return.

    raises  ArtifactError, StorageError, ValueError  when the model, the store, the device or the port cannot be used
    """
    logs.configure(settings.log_level, settings.log_format)
    _require_keys_for_others(settings)
    require_free(settings.host, settings.port, "--port 8001")
    # Until the server listens to signals, and again after it has shut down and repeats the one that ended it.
    signal.signal(signal.SIGTERM, _exit)
    app = create_app(settings)
    # Once up and down, so that what is wrong is said here in one sentence, not in a traceback of every worker.
    asyncio.run(_rehearse(app))
    _say_who_gets_in(settings)
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "log_config": logs.configuration(settings.log_level, settings.log_format),
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing asks for a client's address
        "http": Connection,
        "ws": "none",
        "lifespan": "on",
        "timeout_graceful_shutdown": settings.shutdown_timeout_s,
    }
    if settings.workers == 1:
        uvicorn.run(app, **options)
    else:
        settings.export()
        with TemporaryDirectory(prefix="lisarec-metrics-") as directory:
            share_metrics(Path(directory))
            config = uvicorn.Config("app.main:create_worker_app", factory=True, workers=settings.workers, **options)
            Workers(config, [config.bind_socket()]).run()


class Workers(Multiprocess):
    """Several processes behind one door, of which this one has a handle too, for those that it may have to start."""

    def join_all(self) -> None:
        """Wait for the workers, which have been told to end.

        The last of them shuts the door. With a handle left here the kernel would let people in, to wait for nobody.
        """
        for door in self.sockets:
            door.close()
        super().join_all()


def _require_keys_for_others(settings: Settings) -> None:
    if settings.keys_file is None and not settings.insecure and not is_loopback(settings.host):
        raise Unprotected(
            f"without keys the service listens on this machine only, not on {settings.host}; make some with "
            "'lisarec keys add --keys FILE' and serve with --keys FILE, or let everybody in with --insecure"
        )


def _say_who_gets_in(settings: Settings) -> None:
    if settings.keys_file is not None:
        return
    if is_loopback(settings.host):
        logger.warning("there are no keys: only this machine can reach the service, and may do everything")
    else:
        logger.warning("there are no keys, and --insecure: whoever reaches %s may do everything", settings.host)


def require_free(host: str, port: int, way_out: str) -> None:
    """Raise PortTaken, which names the way out, when nobody can listen at that address now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PortTaken(
                f"port {port} of {host} cannot be used ({exc.strerror}); choose another one: {way_out}"
            ) from exc


class CloseWhenDraining:
    """ASGI middleware: while the process drains, let clients open their next connection elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        draining = scope["type"] == "http" and scope["state"]["services"].draining
        await self._app(scope, receive, send_closing if draining else send)


@contextlib.contextmanager
def _as_the_server(services: Services, drain_s: float) -> Iterator[None]:
    """Let SIGTERM make the process unready at once, and pass it on to the server a little later.

    The server stops listening as soon as it gets the signal; a load balancer needs a moment to notice. And let the
    garbage collector leave imports and models alone, which stay: looking through them held requests up.
    """
    server = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(server):
        yield  # in a test or another program
        return
    gc.collect()
    gc.freeze()
    _give_large_arrays_back()
    loop = asyncio.get_running_loop()

    def drain(signum: int, frame: FrameType | None) -> None:
        services.draining = True
        loop.call_soon_threadsafe(loop.call_later, drain_s, server, signum, frame)

    signal.signal(signal.SIGTERM, drain)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, server)


def _give_large_arrays_back() -> None:
    """Let the allocator return large arrays as soon as they are freed.

    glibc stops doing so once it has seen a few: they then lie among small objects that hold their pages, and a service
    under load grows by megabytes a minute.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system's
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BYTES)


async def _rehearse(app: FastAPI) -> None:
    async with app.router.lifespan_context(app) as state:
        pass
    if state and state["services"].draining:  # told to end meanwhile
        raise SystemExit(0)


def _exit(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
