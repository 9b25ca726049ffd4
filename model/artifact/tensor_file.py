"""Writes files of tensors atomically: a file is complete, or unchanged, even after a power cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def replace_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, mode_of: Path | None = None
) -> None:
    """Replace the file instead of overwriting it, because processes may have it mapped.

    mode_of  a file whose permissions the new one gets; safetensors lets only the owner read
    raises   OSError  when it cannot be written, for example on a full disk; no unfinished file is left
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        save_file(tensors, unfinished, metadata)
    except SafetensorError as exc:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"'{path}' cannot be written: {exc}") from exc
    if mode_of is not None:
        shutil.copymode(mode_of, unfinished)
    sync(unfinished)
    os.replace(unfinished, path)


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
