"""Hosts as network namespaces, each with a TAP device that a switch connects to the others.

Everything is in namespaces of this process, of network, processes and mounts: when it ends, however it does, the kernel
ends what runs in them and removes devices, addresses and files. Nothing of the real machine's network is touched.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from benchmarks.harness.compose import ROOT
from benchmarks.harness.fork_server import CLONE_NEWNET
from benchmarks.harness.topology import program

SUBNET = "10.90.0"
FLOATING = f"{SUBNET}.100"
DISK = Path("/mnt")  # in the mounts of this process alone: a file system in memory, for all hosts

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # <linux/if_tun.h>
NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "haproxy", "keepalived", "redis-server")


class Host:
    """A network namespace with one device, `eth0`.

    namespace  a file of it, as long as this process runs
    tap        the other end of the device
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"{SUBNET}.{number + 1}"
        self.namespace = ""
        self.tap = -1

    def command(self, *words: str) -> list[str]:
        """Return the command that runs this command on the host, in the same process."""
        first = words[0] if "/" in words[0] else program(words[0])
        return [program("nsenter"), f"--net={self.namespace}", first, *words[1:]]

    def clear(self) -> None:
        """Reset the device to the address of the host only, as after a boot."""
        for words in (("flush", "dev", "eth0"), ("add", f"{self.address}/24", "dev", "eth0")):
            subprocess.run(self.command("ip", "address", *words), check=True)

    def start(self) -> None:
        """Create namespace and device in this thread, which should end afterwards."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "no network namespace")
        self.namespace = f"/proc/{os.getpid()}/fd/{os.open('/proc/thread-self/ns/net', os.O_RDONLY)}"
        self.open_device()

    def open_device(self) -> None:
        """Create the device in the namespace of this thread."""
        self.tap = os.open(TUN, os.O_RDWR)
        fcntl.ioctl(self.tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
        for words in (
            "link set lo up",
            "link set eth0 addrgenmode none",  # no IPv6
            "link set eth0 up",
            f"address add {self.address}/24 dev eth0",
        ):
            subprocess.run([program("ip"), *words.split()], check=True)


class Network:
    """This many hosts, and the outside world with this process.

    raises  OSError, subprocess.CalledProcessError  where this process may not do that
    """

    def __init__(self, hosts: int) -> None:
        subprocess.run([program("mount"), "-t", "tmpfs", "-o", "mode=755", "lisarec-machines", DISK], check=True)
        self.hosts = [Host(number) for number in range(hosts)]
        self.outside = Host(hosts)
        self.outside.open_device()
        for host in self.hosts:
            made = threading.Thread(target=host.start)
            made.start()
            made.join()
        taps = [host.tap for host in (*self.hosts, self.outside)]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.machines.switch", *map(str, taps)],
            stdin=subprocess.PIPE,
            pass_fds=taps,
            cwd=ROOT,
        )
        self._cut: set[tuple[int, int]] = set()

    def unplug(self, host: Host) -> None:
        """Take the host's link down."""
        self._change(self._cut | {(host.number, other) for other in range(len(self.hosts) + 1) if other != host.number})

    def part(self, host: Host, others: Iterable[Host]) -> None:
        """Block traffic between the host and these; the outside world still reaches all of them."""
        self._change(self._cut | {(host.number, other.number) for other in others})

    def heal(self) -> None:
        """Allow all traffic again."""
        self._change(set())

    def close(self) -> None:
        """Stop the switch."""
        self._switch.communicate()

    def pairs(self) -> list[tuple[Host, Host]]:
        """Return all pairs of hosts."""
        return list(combinations(self.hosts, 2))

    def _change(self, cut: set[tuple[int, int]]) -> None:
        self._cut = cut
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(sorted(cut)).encode() + b"\n")
        self._switch.stdin.flush()


def what_is_missing() -> str:
    """Return why hosts cannot be created here; empty if they can."""
    try:
        for name in PROGRAMS:
            program(name)
    except FileNotFoundError as exc:
        return str(exc)
    probe = [*_unshare(), program("ip"), "tuntap", "add", "dev", "probe", "mode", "tap"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return ""
    return f"no network namespace with a TAP device may be made here: {tried.stderr.strip()}"


def enter(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by the module in its own namespaces; their processes end with it."""
    os.execv(program("unshare"), [*_unshare(), sys.executable, "-m", module, *arguments])


def _unshare() -> list[str]:
    return [program("unshare"), *NAMESPACES, *(("--map-root-user",) if os.geteuid() != 0 else ())]
