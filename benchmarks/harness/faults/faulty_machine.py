"""A faulty machine for a process: it loses unsynced writes at a power cut, its disk is slow or full, its clock jumps.

`faulty_machine.c` is compiled on demand and loaded into the process with LD_PRELOAD; it documents what it models.
"""

from __future__ import annotations

import atexit
import random
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("faulty_machine.c")
CONTROL = struct.Struct("<5q")  # as struct control: sync_ms, full, clock_ns, syncs, refused
PAGE = 4096


class FaultyMachine:
    """A machine in a directory; processes keep their files in `live`, and end before a power cut."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.live = self.root / "live"
        self.live.mkdir(parents=True)
        self._control = self.root / "control"
        self._control.write_bytes(bytes(CONTROL.size))
        self._settle()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that runs on this machine."""
        return {"LD_PRELOAD": str(library()), "MACHINE_ROOT": str(self.root)}

    @property
    def syncs(self) -> int:
        """The number of file syncs; 0 means that no process runs on this machine."""
        return self._read()[3]

    @property
    def refused(self) -> int:
        """The number of writes that failed because the disk was full."""
        return self._read()[4]

    def slow_syncs(self, takes_s: float) -> None:
        """Make each sync take this long."""
        self._set(0, round(takes_s * 1e3))

    def fill_disk(self, full: bool) -> None:
        """Make files unable to grow, or able again; existing content can still be overwritten, as on a real disk."""
        self._set(1, int(full))

    def jump_clock(self, by_s: float) -> None:
        """Offset the clock from the real time by this many seconds."""
        self._set(2, round(by_s * 1e9))

    def cut_power(self, rng: random.Random) -> int:
        """Keep in `live` only what is on the disk, and return the number of files that changed.

        About half of the cuts lose everything that was not synced. The others find the disk in the middle of writing
        it: any subset of the overwritten pages is new, and appended data ends at any byte.
        """
        tearing = rng if rng.random() < 0.5 else None
        directories = [self.live, *(path for path in self.live.rglob("*") if path.is_dir())]
        changed = sum(self._restore(directory, tearing) for directory in directories)
        self._settle()
        return changed

    def _restore(self, directory: Path, tearing: random.Random | None) -> int:
        files = {file.name: file for file in directory.iterdir() if file.is_file()}
        before = {name: file.read_bytes() for name, file in files.items()}
        unsynced = {file.stat().st_ino: before[name] for name, file in files.items()}
        after = {}
        for name, inode in self._names_on_disk(directory).items():
            synced = self.root / "synced" / str(inode)
            content = synced.read_bytes() if synced.exists() else b""
            after[name] = torn(content, unsynced.get(inode, content), tearing) if tearing else content
        for file in files.values():
            file.unlink()
        for name, content in after.items():
            (directory / name).write_bytes(content)
        return sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())

    def _names_on_disk(self, directory: Path) -> dict[str, int]:
        listing = self.root / "names" / str(directory.stat().st_ino)
        lines = listing.read_text().splitlines() if listing.exists() else []
        return {name: int(inode) for inode, name in (line.split(" ", 1) for line in lines)}

    def _settle(self) -> None:
        """Note that everything in `live` is on the disk."""
        for part in ("synced", "names", "kept"):
            shutil.rmtree(self.root / part, ignore_errors=True)
            (self.root / part).mkdir()
        for file in self.live.rglob("*"):
            if file.is_file():
                inode = file.stat().st_ino
                shutil.copyfile(file, self.root / "synced" / str(inode))
                with (self.root / "names" / str(file.parent.stat().st_ino)).open("a") as listing:
                    listing.write(f"{inode} {file.name}\n")

    def _read(self) -> tuple[int, ...]:
        return CONTROL.unpack(self._control.read_bytes())

    def _set(self, field: int, value: int) -> None:
        with self._control.open("r+b") as control:  # in place, because processes have mapped the file
            control.seek(8 * field)
            control.write(struct.pack("<q", value))


@cache
def library() -> Path:
    """Compile faulty_machine.c to a shared library; raise FileNotFoundError if there is no C compiler."""
    if shutil.which("cc") is None:
        raise FileNotFoundError("there is no C compiler; on Debian and Ubuntu: apt install gcc libc6-dev")
    directory = tempfile.TemporaryDirectory(prefix="lisarec-machine-")
    atexit.register(directory.cleanup)
    built = Path(directory.name) / "machine.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl", "-lpthread"], check=True)
    return built


def torn(synced: bytes, unsynced: bytes, rng: random.Random) -> bytes:
    """Return what a disk may contain while it writes `unsynced` over `synced`: any subset of pages, and any end."""
    common = min(len(synced), len(unsynced))
    starts = range(0, common, PAGE)
    pages = [rng.choice((synced, unsynced))[start : min(start + PAGE, common)] for start in starts]
    grown = unsynced[common:]
    return b"".join(pages) + (grown[: rng.randint(0, len(grown))] if grown else synced[common:])
