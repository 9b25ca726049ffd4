"""Starts the Python processes of tests by forking one process that has imported the service and loaded its kernels.

A process of its own spends about four seconds on imports, and tests start hundreds of them. `ForkedPopen` takes the
place of `subprocess.Popen`. A command that the fork server can run, `python -m NAME ...` or `python SCRIPT ...`,
becomes a fork of it; every other command starts as usual. The fork is a child of the process of the tests, and ends
with it. It has the standard streams, the environment, the directory and the arguments of the command. The worker
processes of a service are forks of it, too.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import ctypes
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import prometheus_client.values

ROOT = Path(__file__).parents[1]
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # Linux' prctl
LENGTH_BYTES = 8
FORKING = "--multiprocessing-fork"  # the last argument of a process that multiprocessing starts
# the dynamic linker or an import reads these, which a process that is forked has behind it
READ_AT_START = ("LD_PRELOAD", "OMP_NUM_THREADS", "PROMETHEUS_MULTIPROC_DIR", "PYTHONHASHSEED", "TRITON_INTERPRET")
PRELOADED = (
    "app.cli.main",
    "app.jobs.archive",
    "app.jobs.generations",
    "app.jobs.reports.training_progress",
    "app.jobs.retraining.loop",
    "app.main",
    "tests.storage.contract.stores",
    "tests.storage.oracles.random_events",
)


@dataclass(frozen=True)
class Command:
    """Arguments and environment of a forked process."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    new_session: bool


class ForkServer:
    """The client side of the fork server, on a socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": "1"} | os.environ  # also where the first test has removed it
        with theirs:
            self._process = RealPopen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                pass_fds=[theirs.fileno()],
            )

    def start(self, command: Command, streams: Sequence[int]) -> int:
        """Start the command with these descriptors as standard streams; return the process id."""
        content = json.dumps(asdict(command)).encode()
        with self._lock:
            become_subreaper(True)
            try:
                socket.send_fds(self._socket, [len(content).to_bytes(LENGTH_BYTES)], list(streams))
                self._socket.sendall(content)
                answer = self._socket.recv(LENGTH_BYTES, socket.MSG_WAITALL)
            finally:
                become_subreaper(False)
        if not answer:
            raise RuntimeError("the fork server of the tests has ended")
        return int.from_bytes(answer)

    def close(self) -> None:
        """End the server; its forks continue."""
        self._socket.close()
        self._process.wait()


@cache
def fork_server() -> ForkServer:
    """The only fork server of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def become_subreaper(is_one: bool) -> None:
    """Adopt orphaned descendants, or leave that to another process."""
    if ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0):
        raise OSError("the kernel refuses PR_SET_CHILD_SUBREAPER")


RealPopen = subprocess.Popen


class ForkedPopen(RealPopen[Any]):
    """`subprocess.Popen`, which uses the fork server for commands that it can run."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, stdin, _, _, stdout, _, stderr, *_ = rest
        *_, new_session, process_group = rest
        environment = dict(os.environ if env is None else env)
        is_plain = not (executable or preexec_fn or pass_fds or shell or process_group != -1)
        if not (is_plain and can_run(args) and can_have(environment)):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        directory = os.path.abspath(os.fspath(cwd) if cwd is not None else os.getcwd())
        command = Command([os.fspath(argument) for argument in args[1:]], environment, directory, bool(new_session))
        self.pid = fork_server().start(command, streams)
        self._child_created = True
        self._close_pipe_fds(*rest[6:12])  # type: ignore[attr-defined]


def can_run(args: Any) -> bool:
    """Whether a fork can run this command: the interpreter of the tests without options, and a module or script."""
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or args[0] != sys.executable:
        return False
    first = str(args[1])
    return first == "-m" or first.endswith(".py")


def can_have(environment: Mapping[str, str]) -> bool:
    """Whether a fork would behave the same with this environment."""
    return all(environment.get(name) == os.environ.get(name) for name in READ_AT_START)


class Forking:
    """The server side, which forks for each request on the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._tests = os.getppid()
        self._is_warm = False

    def serve(self) -> None:
        """Fork for every request until the tests end."""
        while request := self._receive():
            command, streams = request
            if not self._is_warm:
                self._is_warm = load_kernels(command)
            process = self._fork_orphan(command, streams)
            for stream in streams:
                os.close(stream)
            self._connection.sendall(process.to_bytes(LENGTH_BYTES))

    def _receive(self) -> tuple[Command, list[int]] | None:
        length, ancillary, *_ = self._connection.recvmsg(LENGTH_BYTES, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not length:
            return None
        streams = array.array("i")
        for _, _, content in ancillary:
            streams.frombytes(content)
        content = self._connection.recv(int.from_bytes(length), socket.MSG_WAITALL)
        return Command(**json.loads(content)), streams.tolist()

    def _fork_orphan(self, command: Command, streams: Sequence[int]) -> int:
        """Fork from a process that exits at once, so that the test process adopts the new one."""
        readable, writable = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            process = os.fork()
            if process:
                os.write(writable, process.to_bytes(LENGTH_BYTES))
                os._exit(0)
            for descriptor in (readable, writable, self._connection.fileno()):
                os.close(descriptor)
            while os.getppid() == parent:
                time.sleep(0.000_1)
            end_with(self._tests)
            become(command, streams)
        process = int.from_bytes(os.read(readable, LENGTH_BYTES))
        os.close(readable)
        os.close(writable)
        os.waitpid(between, 0)
        return process


def load_fold() -> None:
    """Load the compiled fold from its cache, which takes half a second, for processes of stores."""
    from storage.state.compiled_fold import compile_fold
    from tests.storage.oracles.random_events import make_generation

    compile_fold(make_generation())


def load_kernels(command: Command) -> bool:
    """Start a service once on the command's model to load compiled code; return whether that worked."""
    from app.main import create_app
    from app.settings import Settings
    from model.artifact import model_directory

    names = iter(command.arguments)
    model = next((next(names, None) for name in names if name == "--model"), None)
    model = model or command.environment.get("LISAREC_MODEL_DIR")
    # what is not packed is read by polars, whose threads do not survive a fork
    if model is None or not (Path(model) / model_directory.PACKED).exists():
        return False

    async def start_and_stop(directory: Path) -> None:
        app = create_app(Settings(model_dir=Path(model), data_dir=directory))
        async with app.router.lifespan_context(app):
            pass

    with TemporaryDirectory() as directory, suppress(Exception):  # a broken model is what the command is about
        asyncio.run(start_and_stop(Path(directory)))
        gc.freeze()
        return True
    return False


def end_with(parent: int) -> None:
    """Make the kernel end this process with its parent, even if that is killed."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the tests were interrupted while this process started
        os._exit(1)


def become(command: Command, streams: Sequence[int]) -> None:
    """Turn this fork into the process of the command."""
    if command.new_session:
        os.setsid()
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    os.chdir(command.directory)
    os.environ.clear()
    os.environ.update(command.environment)
    tempfile.tempdir = None  # the environment names another one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_workers()
    status = run(partial(start, command.arguments))
    with suppress(BaseException):  # what the interpreter does at its end; it has no public names for it
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def fork_workers() -> None:
    """Make multiprocessing fork this process instead of starting an interpreter."""
    spawn = multiprocessing.util.spawnv_passfds

    def fork(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        has_threads = len(os.listdir("/proc/self/task")) > 1  # they do not survive a fork
        if arguments[-1] != FORKING or has_threads:
            return spawn(path, arguments, descriptors)
        process = os.fork()
        if process == 0:
            become_worker(arguments[-2], descriptors)
        return process

    multiprocessing.util.spawnv_passfds = fork  # type: ignore[assignment]  # its parameters have other names


def become_worker(program: str, descriptors: Sequence[int]) -> None:
    """Turn this fork into a multiprocessing process of the program.

    descriptors  of the parent, which the program uses
    """
    gc.freeze()  # what is left of the parent closes no descriptors
    for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *descriptors}:
        with suppress(OSError):  # that of the folder
            os.close(descriptor)
    for number in filter(lambda number: callable(signal.getsignal(number)), signal.valid_signals()):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()  # of this environment
    sys.argv = ["-c", FORKING]
    status = run(partial(exec, program, {}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start(arguments: Sequence[str]) -> None:
    """Run the module or the script as `__main__`."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


def run(program: Callable[[], object]) -> int:
    """Run the program; return the exit status, or the negative signal that ends it."""
    try:
        program()
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        print(exc.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(descriptor: int) -> None:
    """Import the service, then fork for every request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this process
    for name in PRELOADED:
        __import__(name)
    load_fold()
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        Forking(connection).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
