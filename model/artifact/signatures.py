"""Signatures of model directories, which prove who made a model.

``manifest.sig``  64 bytes, an Ed25519 signature (RFC 8032) of the bytes of ``manifest.json``

The manifest has the SHA-256 of every other file, so one signature covers all of them. Keys are PEM files, as OpenSSL
writes and reads them: a private key signs, and a file with one or more public keys determines whose models are loaded.
Text between the keys is ignored.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

SIGNATURE = "manifest.sig"
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 1 << 20
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)


class SignatureError(ValueError):
    """A key cannot be used, or a model is not signed by a trusted key. The message says what to do."""


class TrustedKeys:
    """The public keys of a file. A model that one of them has signed may be loaded."""

    def __init__(self, file: Path, keys: Sequence[Ed25519PublicKey]) -> None:
        self._file = file
        self._keys = keys

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the keys, at least one.

        raises  SignatureError  when the file cannot be read, or one of its keys cannot be used
        """
        keys = []
        for match in _BLOCK.finditer(_content(file)):
            if match[1] != b"PUBLIC KEY":
                raise SignatureError(
                    f"'{file}' contains a {match[1].decode().lower()}; it must contain public keys only"
                )
            try:
                key = load_pem_public_key(match[0])
            except (ValueError, UnsupportedAlgorithm):
                key = None
            if not isinstance(key, Ed25519PublicKey):
                raise SignatureError(f"'{file}' contains a public key that is not an Ed25519 key; remove it")
            keys.append(key)
        if not keys:
            raise SignatureError(f"'{file}' contains no public key; add one with 'lisarec keys model'")
        return cls(file, keys)

    def check(self, directory: Path, manifest: bytes) -> None:
        """Raise SignatureError unless one of the keys has signed these bytes of the directory's manifest."""
        path = directory / SIGNATURE
        if not path.is_file():  # opening a pipe would block for ever
            raise SignatureError(
                f"model directory {str(directory)!r} is not signed, but '{self._file}' requires a signature; "
                f"if the model is yours, run 'lisarec sign {directory}'"
            )
        with path.open("rb") as opened:
            signature = opened.read(SIGNATURE_BYTES + 1)
        if not any(_is_signed(key, signature, manifest) for key in self._keys):
            raise SignatureError(
                f"{path} is not a valid signature of the manifest by a key in '{self._file}'; "
                "copy the model again from its source"
            )

    def __contains__(self, key: Ed25519PublicKey) -> bool:
        return key in self._keys


def read_signing_key(file: Path) -> Ed25519PrivateKey:
    """Read a private key; raises SignatureError, whose message does not quote the file."""
    try:
        key = load_pem_private_key(_content(file), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(
            f"'{file}' contains no Ed25519 private key without a passphrase; create one with 'lisarec keys model'"
        )
    return key


def sign(directory: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Sign these bytes, which are the directory's manifest, and write the signature."""
    unfinished = directory / f"{SIGNATURE}.unfinished"
    with unfinished.open("wb") as file:
        file.write(key.sign(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, directory / SIGNATURE)


def make_key(private_file: Path, public_file: Path) -> str:
    """Create a key pair: the private key in a new file, the public key at the end of the other file. Return its id.

    raises  SignatureError  when the file of the private key exists, or one of them cannot be written
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    comment = f"# {key_id(key.public_key())}, made {datetime.now(UTC):%Y-%m-%d}\n"
    try:
        with public_file.open("ab") as trusted:
            with os.fdopen(os.open(private_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                opened.write(private)
            trusted.write(comment.encode() + public)
    except FileExistsError:
        raise SignatureError(f"'{private_file}' exists already; pass another file for the new key as --key") from None
    except OSError as exc:
        raise SignatureError(f"'{exc.filename}' cannot be written ({exc.strerror})") from None
    return key_id(key.public_key())


def key_id(key: Ed25519PublicKey) -> str:
    """Return the first 16 hex digits of the SHA-256 of the key."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _is_signed(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as exc:
        raise SignatureError(
            f"'{file}' cannot be read ({exc.strerror}); create keys with 'lisarec keys model'"
        ) from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise SignatureError(f"'{file}' is too large for a key file")
    return content
