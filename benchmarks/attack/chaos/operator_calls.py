"""Operator actions of the chaos run, by HTTP and commands, and their permitted outcomes.

A call or a command may fail while something is taken away from the service, and for a while afterwards. At any other
time it has to succeed. It never ends with a traceback, and no call is answered with 500, 501 or 502.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.attack.chaos.environment import TRACEBACK, ChaosEnvironment
from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.retrying_clients import NO_ANSWER, TRANSPORT_ERRORS, HttpConnection

RECOVERY_S = 10.0
COMMAND_WITHIN_S = 600.0  # commands give way to everybody
ACCEPTED_WITHIN_S = 200.0
UNEXPECTED = "500", "501", "502"  # statuses that no request may get
SHOWN_CHARS = 2_000  # of what a command or a traceback says


class Operator:
    """Calls and commands of an operator.

    outcomes  how often which call was answered how, and which command ended how
    faults    calls and commands that failed, and had no reason to
    """

    def __init__(self, environment: ChaosEnvironment) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._environment = environment
        self._disturbances = 0
        self._disturbed_until_s = -math.inf

    @property
    def is_disturbed(self) -> bool:
        """Return whether a disturbance is in progress."""
        return self._disturbances > 0

    @contextmanager
    def disturbance(self) -> Iterator[None]:
        """Mark a disturbance of the service within the block."""
        self._disturbances += 1
        try:
            yield
        finally:
            self._disturbances -= 1
            self._disturbed_until_s = time.monotonic()

    async def call(self, address: Address, method: str, path: str, body: object = None) -> bool:
        """Send a request; return whether it succeeded."""
        since_s, connection = time.monotonic(), HttpConnection(address)
        try:
            status, _ = await connection.request(method, path, body)
            outcome = str(status)
        except TRANSPORT_ERRORS:
            outcome = NO_ANSWER
        finally:
            connection.close()
        said = self._environment.last_traceback(address) if outcome in UNEXPECTED else ""
        self._judge(f"{method} {path}", outcome, since_s, done="200", excusable=("503", NO_ANSWER), said=said)
        return outcome == "200"

    async def command(self, *arguments: str, killed_after_s: float = COMMAND_WITHIN_S) -> bool | None:
        """Run a command; return whether it succeeded, or None if it was killed."""
        since_s = time.monotonic()
        status, said = await self._environment.run_command(*arguments, killed_after_s=killed_after_s)
        name = " ".join(argument for argument in arguments if "/" not in argument)
        if TRACEBACK in said:
            self.faults.append(f"lisarec {name}: {said[said.index(TRACEBACK) :]}")
        if status is None:
            self.outcomes[f"lisarec {name}: killed"] += 1
            if killed_after_s == COMMAND_WITHIN_S:
                self.faults.append(f"lisarec {name}: no end after {COMMAND_WITHIN_S:g} s: {said}")
            return None
        self._judge(f"lisarec {name}", str(status), since_s, done="0", excusable=("1",), said=said)
        return status == 0

    async def accept_loss(self) -> bool:
        """Accept the loss of the store; retry while others interfere."""
        give_up_at_s = time.monotonic() + ACCEPTED_WITHIN_S
        with self.disturbance():
            while not await self.command("repair", "--accept-loss"):
                if time.monotonic() > give_up_at_s:
                    self.faults.append("the loss could not be accepted")
                    return False
                await asyncio.sleep(1)
        return True

    async def require_success(self) -> None:
        """Retry everything without disturbances; what still fails is a fault."""
        environment, name = self._environment, self._environment.models[0].name
        shares = {model.name: 1 / len(environment.models) for model in environment.models}
        for address in environment.addresses:
            activate = partial(self.call, address, "POST", f"/v1/admin/generations/{name}/activate")
            begin = partial(self.call, address, "PUT", "/v1/admin/experiment", {"name": "quiet", "shares": shares})
            end = partial(self.call, address, "DELETE", "/v1/admin/experiment")
            for call in (activate, begin, end):
                await self._until_done(call)
        for model in environment.models:
            await self._until_done(partial(self.command, "rebuild", "--model", str(model)))
        await self._until_done(partial(self.command, "repair"))

    async def _until_done(self, attempt: Callable[[], Awaitable[bool | None]]) -> None:
        """Retry until success or a fault, that is, a failure longer than RECOVERY_S after any disturbance."""
        known = len(self.faults)
        while not await attempt() and len(self.faults) == known:
            await asyncio.sleep(0.5)

    def _judge(
        self, what: str, outcome: str, since_s: float, *, done: str, excusable: tuple[str, ...], said: str = ""
    ) -> None:
        self.outcomes[f"{what}: {outcome}"] += 1
        was_disturbed = self.is_disturbed or self._disturbed_until_s > since_s - RECOVERY_S
        if outcome != done and not (outcome in excusable and was_disturbed):
            self.faults.append(f"{what}: {outcome} {said.strip()[-SHOWN_CHARS:]}".rstrip())
