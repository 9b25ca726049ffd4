"""Small file systems, for volumes that tests fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHUNK = bytes(1 << 16)


class SmallDisk:
    """A mounted file system of a few megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    @property
    def volume(self) -> dict[str, object]:
        """A Compose volume on this file system."""
        return {"driver": "local", "driver_opts": {"type": "none", "o": "bind", "device": str(self.folder)}}

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the file system within the block."""
        try:
            with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(CHUNK)
            yield
        finally:
            self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, megabytes: int, owner: int) -> Iterator[SmallDisk]:
    """Mount a file system that belongs to the user with this id."""
    folder.mkdir()
    options = f"size={megabytes}m,uid={owner},gid={owner},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
