"""The objects below a prefix of a bucket: S3 and compatible services, Google Cloud Storage, Azure.

An object appears completely or not at all, so nothing is renamed. Conditional puts replace the lock. Credentials are
read from where each provider's own tools look: the environment, and the identity of the machine or container.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError
from obstore.store import from_url
from typing_extensions import override

from storage.folders.folder import OWNER_ONLY, Content, Folder, Overtaken, Version

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

UNFINISHED = "unfinished"  # subfolder of the cache for downloads, which are renamed when they are complete
ABANDONED_AFTER_S = 3_600.0
CHUNK = 8 << 20
HEX_DIGITS = re.compile(r"[0-9a-f]+")
# An endpoint in the environment may use plain HTTP; the providers' own endpoints use TLS.
BULK: ClientConfig = {"allow_http": True, "connect_timeout": "3s", "read_timeout": "30s", "timeout": "1h"}
BULK_RETRIES: RetryConfig = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
QUICK: ClientConfig = {"allow_http": True, "connect_timeout": "2s", "timeout": "2s"}  # for calls that requests wait for
QUICK_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}


class ObjectFolder(Folder):
    """The objects below a URL such as s3://bucket/prefix, and copies of them in a local directory."""

    def __init__(self, url: str, cache: Path) -> None:
        self._url = url
        self._cache = cache / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return self._url

    @cached_property
    def _bulk(self) -> ObjectStore:
        """The client for contents of any size, which waits as long as data arrives."""
        return from_url(self._url, client_options=BULK, retry_config=BULK_RETRIES)

    @cached_property
    def _quick(self) -> ObjectStore:
        """The client for short contents, which fails fast."""
        return from_url(self._url, client_options=QUICK, retry_config=QUICK_RETRIES)

    @override
    def names(self) -> Iterator[str]:
        with self._failing():
            for page in obstore.list(self._bulk):
                yield from (found["path"] for found in page)

    @override
    def has(self, name: str) -> bool:
        try:
            self._head(name)
        except FileNotFoundError:
            return False
        return True

    @override
    def read(self, name: str, known: Version | None = None) -> Content | None:
        with self._failing(name):
            try:
                found = obstore.get(self._quick, name, options={"if_none_match": known[0]} if known else None)
            except NotModifiedError:
                return None
            return Content(bytes(found.bytes()), _version(found.meta), found.meta["last_modified"].timestamp())

    @override
    def add(self, name: str, data: bytes | memoryview) -> None:
        with self._failing(name):
            obstore.put(self._bulk, name, data)

    @override
    def replace(self, name: str, data: bytes | memoryview, version: Version | None) -> Version:
        mode: PutMode = "create" if version is None else _update(version)
        with self._failing(name):
            try:
                return _version(obstore.put(self._bulk, name, data, mode=mode, use_multipart=False))
            except (AlreadyExistsError, PreconditionError) as exc:
                # a put whose response is lost is retried, and then finds its own content
                found = self.read(name)
                if found is None or found.data != data:
                    raise Overtaken(f"another process has replaced '{name}'") from exc
                return found.version

    @override
    def remove(self, name: str) -> None:
        with self._failing(name), suppress(FileNotFoundError):
            obstore.delete(self._bulk, name)
        for copy in self._cache.glob(f"*/{glob.escape(name)}"):
            copy.unlink(missing_ok=True)

    @override
    def path(self, name: str, sha256: str | None = None) -> Path:
        if sha256 is not None and not HEX_DIGITS.fullmatch(sha256):  # it is the name of a folder
            raise OSError(f"{sha256!r}, which is listed for '{self._url}/{name}', is no SHA-256")
        copy = self._cache / (sha256 or self._digest_of_version(name)) / name
        if not copy.exists():
            unfinished = self._cache / UNFINISHED / uuid4().hex
            self._cache.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
            unfinished.parent.mkdir(exist_ok=True)
            try:
                self._download(name, unfinished, sha256)
                copy.parent.mkdir(parents=True, exist_ok=True)
                unfinished.rename(copy)
            finally:
                unfinished.unlink(missing_ok=True)
        return copy

    def _head(self, name: str) -> Version:
        with self._failing(name):
            return _version(obstore.head(self._quick, name))

    def _digest_of_version(self, name: str) -> str:
        version = "".join(self._head(name))
        return hashlib.sha256(version.encode()).hexdigest()[:32]

    def _download(self, name: str, path: Path, sha256: str | None) -> None:
        digest = hashlib.sha256()
        with self._failing(name), path.open("wb") as file:
            found = obstore.get(self._bulk, name)
            for chunk in found.stream(min_chunk_size=CHUNK):
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
            if file.tell() != found.meta["size"] or not digest.hexdigest().startswith(sha256 or ""):
                raise OSError(f"'{self._url}/{name}' differs from what was uploaded")

    @override
    def forget_copies_except(self, names: Collection[str]) -> None:
        abandoned_s = time.time() - ABANDONED_AFTER_S
        for path in self._cache.rglob("*"):
            folder, *parts = path.relative_to(self._cache).parts  # UNFINISHED, or the hash of the file
            with suppress(FileNotFoundError):
                is_kept = path.stat().st_mtime > abandoned_s if folder == UNFINISHED else "/".join(parts) in names
                if not is_kept and not path.is_dir():
                    path.unlink()

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        yield  # no lock: `replace` detects other writers

    @contextmanager
    def _failing(self, name: str = "") -> Iterator[None]:
        """Translate the errors of the object store, and of the connection to it, to OSError."""
        try:
            yield
        except FileNotFoundError as exc:
            missing = f"the bucket of '{self._url}'" if "NoSuchBucket" in str(exc) else f"'{self._url}/{name}'"
            raise FileNotFoundError(f"{missing} does not exist") from None
        except (BaseError, ValueError) as exc:
            raise OSError(f"'{self._url}' failed: {str(exc).partition(chr(10))[0]}") from exc


def _version(found: Any) -> Version:
    return found["e_tag"] or "", found["version"] or ""


def _update(version: Version) -> PutMode:
    e_tag, generation = version
    return {"e_tag": e_tag} | ({"version": generation} if generation else {})  # type: ignore[return-value]
