"""Servers of tests end with the tests, even if these are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.redis.servers import find_servers
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
START = """if True:
    import signal, sys, threading
    from tests.storage.redis.servers import RedisServer
    server = RedisServer(sys.argv[1])
    server.kill()
    restart = threading.Thread(target=server.start)
    restart.start()
    restart.join()
    print(server.process_id, server.directory, server.client.ping(), flush=True)
    signal.pause()
"""


@pytest.mark.usefixtures("interpreter_starts")
def test_a_server_ends_with_the_test_process_and_not_with_its_threads() -> None:
    command = [sys.executable, "-c", START, find_servers()["redis-server"]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        process_id, directory, answers = tests.stdout.readline().split()
        assert answers == "True"
        assert Path(f"/proc/{process_id}/cwd").samefile(directory)
        tests.send_signal(signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{process_id}/cwd") and not os.path.exists(directory))
