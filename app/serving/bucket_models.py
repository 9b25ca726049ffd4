"""Models in a bucket, and verified copies of them on this machine.

A model consists of the objects NAME/FILE of a model directory. The manifest is written last and contains the hashes of
the other files, so an incomplete model is never used. A copy is a model directory CACHE/HASH/NAME, where HASH is that
of the manifest and its signature. It appears by rename once each file has the hash given in the manifest.
"""

import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from typing_extensions import override

from app.serving.model_registry import ModelRegistry, is_name, no_such_model
from model.artifact import model_directory
from model.artifact.model_directory import FILES, MANIFEST, Artifact, ArtifactError
from model.artifact.signatures import SIGNATURE
from storage.folders.folder import Content, add_file
from storage.folders.object_folder import ObjectFolder
from storage.folders.place import ObjectUrl

LOCK = "copying.lock"
UNFINISHED = "unfinished"
DIGEST_DIGITS = 32

logger = logging.getLogger(__name__)


class _Named(NamedTuple):
    """The manifest of a model, and its signature; the signature is empty if there is none."""

    manifest: Content
    signature: bytes

    def digest(self) -> str:
        """Return the hash that names copies of this model."""
        return _digest(self.manifest.data, self.signature)


class BucketModels(ModelRegistry):
    """The models below a URL.

    keys_file  public keys, one of which must have signed each loaded model; None if no signature is required
    """

    def __init__(self, url: ObjectUrl, cache: Path, keys_file: Path | None = None) -> None:
        self._keys_file = keys_file
        self.folder = ObjectFolder(url.url, cache / "objects")
        own = hashlib.sha256(url.url.encode()).hexdigest()[:16]
        self.work = cache / "trainer" / own
        self._copies = cache / "models" / own

    @override
    def names(self) -> list[str]:
        found = (name.partition("/") for name in self.folder.names())
        return sorted(name for name, _, file in found if file == MANIFEST and is_name(name))

    @override
    def path(self, name: str) -> Path:
        try:
            named = _Named(self._read_manifest(name), self._read_signature(name))
            with self._copying():
                copy = self._copies / named.digest() / name
                if not copy.exists():
                    self._copy(name, named, copy)
                    self._remove_copies_except(copy)
            return copy
        except OSError as exc:
            copies = [*self._copies.glob(f"*/{glob.escape(name)}/{MANIFEST}")]
            if copies:
                logger.warning("using a local copy of model %r, which may be outdated: %s", name, exc)
                return max(copies, key=lambda path: path.stat().st_mtime).parent
            raise ArtifactError(f"'{self.folder}/{name}' cannot be read: {exc}") from exc

    @override
    def load(self, name: str) -> Artifact:
        copy = self.path(name)
        try:
            return model_directory.load(copy, self._keys_file)
        except ArtifactError:
            if _is_whole(copy):
                raise
            shutil.rmtree(copy, ignore_errors=True)
            return model_directory.load(self.path(name), self._keys_file)

    def _read_manifest(self, name: str) -> Content:
        if is_name(name):
            try:
                found = self.folder.read(f"{name}/{MANIFEST}")
            except FileNotFoundError:
                pass
            else:
                assert found is not None
                return found
        raise no_such_model(self.folder, name, self.names())

    def _read_signature(self, name: str) -> bytes:
        try:
            found = self.folder.read(f"{name}/{SIGNATURE}")
        except FileNotFoundError:
            return b""
        assert found is not None
        return found.data

    def _copy(self, name: str, named: _Named, copy: Path) -> None:
        manifest = named.manifest
        unfinished = self._copies / UNFINISHED / uuid4().hex
        unfinished.mkdir(parents=True)
        try:
            for file, sha256 in _hashes(name, manifest).items():
                self.folder.path(f"{name}/{file}", sha256).rename(unfinished / file)
            if named.signature:
                (unfinished / SIGNATURE).write_bytes(named.signature)
            (unfinished / MANIFEST).write_bytes(manifest.data)
            os.utime(unfinished / MANIFEST, (manifest.modified_s, manifest.modified_s))
            copy.parent.mkdir(parents=True, exist_ok=True)
            unfinished.rename(copy)
        except FileNotFoundError as exc:
            raise ArtifactError(f"'{self.folder}/{name}' lacks files: {exc}; copy or train the model again") from exc
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _remove_copies_except(self, new: Path) -> None:
        """Remove copies of models that the bucket no longer has, or has in another version."""
        names = self.names()
        for copy in self._copies.glob("*/*"):
            if copy.is_dir() and copy != new and (copy.name == new.name or copy.name not in names):
                shutil.rmtree(copy, ignore_errors=True)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Let one process of this machine copy at a time, on behalf of all."""
        self._copies.mkdir(parents=True, exist_ok=True)
        with (self._copies / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @override
    def publish(self, name: str) -> None:
        for file in (*FILES, SIGNATURE, MANIFEST):
            if (self.work / name / file).exists():  # a model trained without orders has no complements
                add_file(self.folder, f"{name}/{file}", self.work / name / file)
            elif file == SIGNATURE:
                self.folder.remove(f"{name}/{file}")

    @override
    def remove(self, name: str) -> None:
        for file in (MANIFEST, SIGNATURE, *FILES):  # without the manifest, the remaining files are ignored
            self.folder.remove(f"{name}/{file}")
        shutil.rmtree(self.work / name, ignore_errors=True)


def _hashes(name: str, manifest: Content) -> dict[str, str]:
    try:
        hashes = json.loads(manifest.data)
        return {file: str(hashes[file]) for file in FILES if file in hashes}
    except (ValueError, TypeError, AttributeError) as exc:
        raise ArtifactError(f"the manifest of model {name!r} is invalid; copy or train the model again") from exc


def _digest(manifest: bytes, signature: bytes) -> str:
    return hashlib.sha256(manifest + signature).hexdigest()[:DIGEST_DIGITS]


def _is_whole(copy: Path) -> bool:
    signature = copy / SIGNATURE
    try:
        model_directory.verified_tag(copy)
        digest = _digest((copy / MANIFEST).read_bytes(), signature.read_bytes() if signature.exists() else b"")
    except (ArtifactError, OSError):
        return False
    return digest == copy.parent.name
