"""An Ethernet switch between the TAP devices of the hosts, with delay, loss and cut lines.

Not every kernel has `tc netem`, this one needs none. Every line on the standard input is a JSON list of the pairs of
ports between which nothing passes from now on; the end of the input ends the switch.

    python -m benchmarks.machines.switch FILE_DESCRIPTOR...      of TAP devices, in the order of the ports
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections import deque
from collections.abc import Sequence

DELAY_S = 0.001
LOSS = 0.001  # of the frames
FRAME_BYTES = 2048  # none is longer: devices have an MTU of 1,500
AT_ONCE = 64  # frames of one port, before the others have their turn


class Switch:
    """Forwards frames after the delay to the port where their address was last seen."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = taps
        self._port_of: dict[bytes, int] = {}
        self._cut: set[tuple[int, int]] = set()
        self._under_way: deque[tuple[float, int, bytes]] = deque()
        for tap in taps:
            os.set_blocking(tap, False)

    def cut(self, pairs: Sequence[Sequence[int]]) -> None:
        """Block traffic between these pairs of ports, and allow all other traffic."""
        self._cut = {(one, other) for one, other in pairs} | {(other, one) for one, other in pairs}

    def run(self, commands: int) -> None:
        """Forward frames until the commands end."""
        ports = {tap: port for port, tap in enumerate(self._taps)}
        while True:
            wait_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for readable in select.select([*self._taps, commands], [], [], wait_s)[0]:
                if readable != commands:
                    self._take(ports[readable])
                elif (said := os.read(commands, 65_536)) != b"":
                    self.cut(json.loads(said.splitlines()[-1]))
                else:
                    return
            self._deliver()

    def _take(self, port: int) -> None:
        due_s = time.monotonic() + DELAY_S
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self._taps[port], FRAME_BYTES)
            except BlockingIOError:
                return
            target = self._port_of.get(frame[:6])
            self._port_of[frame[6:12]] = port
            for other in range(len(self._taps)) if target is None else (target,):
                if other != port and (port, other) not in self._cut and random.random() >= LOSS:
                    self._under_way.append((due_s, other, frame))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now_s:
            _, port, frame = self._under_way.popleft()
            os.write(self._taps[port], frame)


def main() -> None:
    """Run the switch on its ports."""
    Switch([int(number) for number in sys.argv[1:]]).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
