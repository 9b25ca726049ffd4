"""The disks that a power cut may leave, after every system call of a command that writes files.

python -m benchmarks.resilience.crash_states [NAME...] [--every 5]

strace records a run. After each recorded call, disks are made of what was synced by then, and of parts of the rest:
nothing, everything, zeros in place of data, or a random choice of pages and of bytes at the end of each file. Names
follow one of two orders:

  journal  changes of names survive up to any one of them, at least those before the last sync of anything (ext4, xfs)
  strict   a change of a name survives if its folder was synced afterwards; any other one does or does not, on its own

Each disk is opened as after a restart. What the run had acknowledged by then must be there, and no half of a file may
look whole. The exit status is 1 otherwise.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import typer

from benchmarks.harness.faults.faulty_machine import torn
from benchmarks.resilience.crash_workloads import WORKLOADS, Workload

CALLS = (
    *("openat", "write", "pwrite64", "ftruncate", "lseek", "close", "fsync", "fdatasync", "mkdir", "mkdirat", "rmdir"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "link", "linkat"),
)
CALL = re.compile(r"\d+ +(\w+)\((.*)\) += (\d+)(?:<([^>]*)>)?")
BEGUN = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
ENDED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
ACKNOWLEDGED = b"acknowledged: "
RANDOM_DISKS = 3  # at each call, in each order

Order: TypeAlias = Literal["journal", "strict"]
ORDERS: tuple[Order, ...] = ("journal", "strict")
Content: TypeAlias = Literal["old", "new", "zeros", "torn"]
DiskFiles: TypeAlias = dict[str, bytes | None]  # None: a folder


@dataclass(eq=False)
class Node:
    """A file or folder. A write is (time, offset, data); data is None where the file was cut to that length."""

    is_folder: bool
    writes: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    names: dict[str, Node] = field(default_factory=dict)
    synced: list[int] = field(default_factory=list)  # times

    def last_sync(self, time: int) -> int:
        """Return the time of the last sync before that time; -1 if there was none."""
        return max((at for at in self.synced if at < time), default=-1)

    def content(self, begin: int, end: int, content: bytearray) -> bytearray:
        """Apply the writes from one time up to another to the content."""
        for at, offset, data in self.writes:
            if begin <= at < end:
                size = offset if data is None else offset + len(data)
                content.extend(bytes(max(0, size - len(content))))
                if data is None:
                    del content[offset:]
                else:
                    content[offset:size] = data
        return content


class Rename(NamedTuple):
    """A change of names: (folder, name, node), where None removes the name. The last one decides about durability."""

    time: int
    names: Sequence[tuple[Node, str, Node | None]]


class Recording:
    """The calls of a run below a folder, which was empty before. The number of a call is its time."""

    def __init__(self, root: Path) -> None:
        self.folder = Node(is_folder=True)
        self.renames: list[Rename] = []
        self.acknowledged: list[tuple[int, str]] = []
        self.calls = 0
        self.synced: list[int] = []
        self._root = str(root.resolve())
        self._open: dict[int, tuple[Node, list[int]]] = {}  # with the position, for each descriptor

    @classmethod
    def of(cls, command: Sequence[str], root: Path) -> Recording:
        """Run the command, of one process, and record what it does below the folder."""
        recording = cls(root)
        with tempfile.NamedTemporaryFile() as log:
            traced = ["strace", "-f", "-y", "-xx", "-s", "100000000", "--seccomp-bpf", "-o", log.name]
            traced += ["-e", "trace=" + ",".join(f"?{call}" for call in CALLS)]
            subprocess.run([*traced, *command], check=True, stderr=subprocess.DEVNULL)
            begun: dict[str, str] = {}
            for line in Path(log.name).read_text().splitlines():
                recording.read(line, begun)
        return recording

    def read(self, line: str, begun: dict[str, str]) -> None:
        """Read a line of strace, or keep it until the rest comes."""
        if match := BEGUN.match(line):
            if match[2] == "close":  # the number may be another file's before the call ends
                self._open.pop(int(match[3].partition("<")[0]), None)
            else:
                begun[match[1]] = f"{match[1]} {match[2]}({match[3]}"
            return
        if match := ENDED.match(line):
            line = begun.pop(match[1], "") + match[2]
        match = CALL.match(line)
        if match and match[1] in CALLS:
            name, arguments, result, place = match.groups()
            read = getattr(self, f"_{CALLED.get(name, name)}")
            read(_split(arguments), int(result), _text(place or ""))

    def _node(self, path: str) -> tuple[Node | None, str, Node | None]:
        """Return a path's folder, its name and what has this name, if the path is below the root."""
        folder, name = self.folder, ""
        if not path.startswith(self._root + "/"):
            return None, "", None
        *parts, name = path[len(self._root) + 1 :].split("/")
        for part in parts:
            folder = folder.names[part]
        return folder, name, folder.names.get(name)

    def _rename(self, *names: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in names:
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node
        self.renames.append(Rename(self.calls, names))
        self.calls += 1

    def _note(self, node: Node, offset: int, data: bytes | None) -> None:
        node.writes.append((self.calls, offset, data))
        self.calls += 1

    # ---- the calls

    def _openat(self, arguments: list[str], result: int, place: str) -> None:
        self._open.pop(result, None)
        folder, name, node = self._node(place)
        if place == self._root:
            node = self.folder
        elif folder is None:
            return
        elif node is None:
            if "O_CREAT" not in arguments[2]:
                return
            node = Node(is_folder=False)
            self._rename((folder, name, node))
        elif "O_TRUNC" in arguments[2]:
            self._note(node, 0, None)
        end = len(node.content(0, self.calls, bytearray())) if "O_APPEND" in arguments[2] else 0
        self._open[result] = node, [end]

    def _write(self, arguments: list[str], result: int, _: str) -> None:
        data = _bytes(arguments[1])[:result]
        if found := self._open.get(int(arguments[0].partition("<")[0])):
            node, position = found
            self._note(node, position[0], data)
            position[0] += result
        elif data.startswith(ACKNOWLEDGED):
            self.acknowledged.append((self.calls, data[len(ACKNOWLEDGED) :].decode().strip()))

    def _pwrite64(self, arguments: list[str], result: int, _: str) -> None:
        if found := self._open.get(int(arguments[0].partition("<")[0])):
            self._note(found[0], int(arguments[3]), _bytes(arguments[1])[:result])

    def _ftruncate(self, arguments: list[str], _: int, __: str) -> None:
        if found := self._open.get(int(arguments[0].partition("<")[0])):
            self._note(found[0], int(arguments[1]), None)

    def _lseek(self, arguments: list[str], result: int, _: str) -> None:
        if found := self._open.get(int(arguments[0].partition("<")[0])):
            found[1][0] = result

    def _close(self, arguments: list[str], _: int, __: str) -> None:
        self._open.pop(int(arguments[0].partition("<")[0]), None)

    def _fsync(self, arguments: list[str], _: int, __: str) -> None:
        if found := self._open.get(int(arguments[0].partition("<")[0])):
            found[0].synced.append(self.calls)
            self.synced.append(self.calls)
            self.calls += 1

    def _mkdir(self, arguments: list[str], _: int, __: str) -> None:
        folder, name, _node = self._node(*_paths(arguments))
        if folder is not None:
            self._rename((folder, name, Node(is_folder=True)))

    def _unlink(self, arguments: list[str], _: int, __: str) -> None:
        folder, name, _node = self._node(*_paths(arguments))
        if folder is not None:
            self._rename((folder, name, None))

    def _move(self, arguments: list[str], _: int, __: str) -> None:
        (old_folder, old_name, node), (new_folder, new_name, _node) = map(self._node, _paths(arguments))
        if old_folder is not None and new_folder is not None:
            self._rename((old_folder, old_name, None), (new_folder, new_name, node))

    def _link(self, arguments: list[str], _: int, __: str) -> None:
        (_folder, _name, node), (folder, name, _node) = map(self._node, _paths(arguments))
        if folder is not None:
            self._rename((folder, name, node))

    # ---- the disks

    def disks(self, time: int, rng: random.Random) -> Iterator[tuple[Order, DiskFiles]]:
        """Iterate over disks that a power cut before the call of that number may leave."""
        for order in ORDERS:
            for share in (0.0, 1.0, *[0.5] * RANDOM_DISKS):
                renames = self._renames(time, order, share, rng)
                for content in ("old", "new", "zeros") if share in (0, 1) else ("torn",):
                    yield order, self._disk(renames, time, content, rng)

    def _renames(self, time: int, order: Order, share: float, rng: random.Random) -> list[Rename]:
        done = [one for one in self.renames if one.time < time]
        if order == "strict":
            return [one for one in done if one.names[-1][0].last_sync(time) > one.time or rng.random() < share]
        last = max((at for at in self.synced if at < time), default=-1)
        safe = sum(one.time < last for one in done)
        loose = len(done) - safe
        return done[: safe + (rng.randint(0, loose) if 0 < share < 1 else int(loose * share))]

    def _disk(self, renames: Sequence[Rename], time: int, content: Content, rng: random.Random) -> DiskFiles:
        names: dict[Node, dict[str, Node]] = {}
        for one in renames:
            for folder, name, node in one.names:
                if node is None:
                    names.setdefault(folder, {}).pop(name, None)
                else:
                    names.setdefault(folder, {})[name] = node

        def files(folder: Node, prefix: str) -> Iterator[tuple[str, bytes | None]]:
            for name, node in names.get(folder, {}).items():
                if node.is_folder:
                    yield prefix + name, None
                    yield from files(node, f"{prefix}{name}/")
                elif not name.endswith("-shm"):  # SQLite makes it anew
                    yield prefix + name, _left(node, time, content, rng)

        return dict(files(self.folder, ""))


CALLED = {"fdatasync": "fsync", "mkdirat": "mkdir", "unlinkat": "unlink", "rmdir": "unlink"}
CALLED |= {"rename": "move", "renameat": "move", "renameat2": "move", "linkat": "link"}


def _left(node: Node, time: int, content: Content, rng: random.Random) -> bytes:
    """Return what a power cut may leave of a file."""
    synced = node.last_sync(time) + 1
    old = node.content(0, synced, bytearray())
    new = node.content(synced, time, bytearray(old))
    if content == "torn":
        content = rng.choice(("old", "new", "zeros", "torn"))
    if content == "zeros":
        return bytes(old) + bytes(max(0, len(new) - len(old)))
    if content != "torn":
        return bytes(old if content == "old" else new)
    return torn(bytes(old), bytes(new), rng)


def _split(arguments: str) -> list[str]:
    return re.split(r", (?![^\[{]*[\]}])", arguments)


def _bytes(quoted: str) -> bytes:
    return bytes.fromhex(quoted.strip('"').replace("\\x", ""))


def _text(escaped: str) -> str:
    return bytes.fromhex(escaped.replace("\\x", "")).decode() if escaped.startswith("\\x") else escaped


def _paths(arguments: Sequence[str]) -> list[str]:
    """Return the absolute paths among the arguments; one may follow the descriptor of its folder."""
    folder, paths = os.getcwd(), []
    for one in arguments:
        if one.startswith('"'):
            paths.append(os.path.join(folder, os.fsdecode(_bytes(one))))
        elif match := re.search("<(.*)>", one):
            folder = _text(match[1])
    return paths


def try_disks(recording: Recording, workload: Workload, place: Path, every: int = 1) -> tuple[int, Counter[str]]:
    """Check the disks after every so many calls; return how many there were, and how often a law was broken."""
    rng, seen, broken = random.Random(0), set[int](), Counter[str]()
    for time in {*range(0, recording.calls, every), recording.calls}:
        acknowledged = [text for at, text in recording.acknowledged if at <= time]
        for order, disk in recording.disks(time, rng):
            key = hash((frozenset(disk.items()), len(acknowledged)))
            if key in seen:
                continue
            seen.add(key)
            write_disk(disk, place)
            try:
                problems = [*workload.problems(place, acknowledged)]
            except Exception as exc:  # what cannot be opened is lost, too
                problems = [f"{type(exc).__name__}: {str(exc).replace(str(place), '')}"]
            broken.update(f"{order}: {problem}" for problem in problems)
    return len(seen), broken


def write_disk(disk: DiskFiles, place: Path) -> None:
    """Write the files of a disk into a folder, which is emptied before."""
    with suppress(FileNotFoundError):
        shutil.rmtree(place)
    place.mkdir()
    for name, content in disk.items():
        if content is None:
            (place / name).mkdir()
        else:
            (place / name).write_bytes(content)


def run(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(WORKLOADS)}. Default: all.")] = None,
    every: Annotated[int, typer.Option(help="Cut the power after every so many calls.")] = 1,
) -> None:
    """Record the workloads, and check the disks that power cuts may leave."""
    failed = False
    for name in names or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="lisarec-crash-") as folder:
            root = Path(folder) / "run"
            root.mkdir()
            command = [sys.executable, "-m", "benchmarks.resilience.crash_workloads", name, str(root)]
            recording = Recording.of(command, root)
            disks, broken = try_disks(recording, WORKLOADS[name], Path(folder) / "disk", every)
        counts = f"{recording.calls} calls, {len(recording.synced)} syncs, {disks} disks"
        print(f"{name}: {counts}: {dict(broken) or 'all laws hold'}")
        failed |= bool(broken) or not recording.acknowledged
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(run)
