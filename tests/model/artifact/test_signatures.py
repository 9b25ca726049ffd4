"""Signed models: only those signed by a trusted key are loaded, in agreement with OpenSSL."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model import config
from model.artifact import model_directory, signatures
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import MANIFEST, WEIGHTS, ArtifactError
from model.artifact.signatures import SIGNATURE, SignatureError, TrustedKeys, read_signing_key
from model.lisa.lisa_mini import LisaMini
from tests.waiting import PATIENCE_S

SHAPE = config.ModelConfig(
    width=8, history_codebooks=2, history_codewords=4, target_codebooks=3, target_codewords=256, dropout=0.0
)
ITEMS = ItemTable(["a", "b"], ["A", "B"], [(), ("p",)], np.array([3, 0]))


def openssl(*command: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["openssl", *map(str, command)], capture_output=True, timeout=PATIENCE_S)


def sign(directory: Path, key_file: Path) -> None:
    signatures.sign(directory, (directory / MANIFEST).read_bytes(), read_signing_key(key_file))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with private keys of two signers, `one` and `two`, and a file of public keys of each."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("one", "two"):
        signatures.make_key(folder / name, folder / f"{name}.pub")
    return folder


@pytest.fixture
def unsigned(tmp_path: Path, random_model: Callable[..., LisaMini]) -> Path:
    directory = tmp_path / "models" / "mine"
    model_directory.save(directory, random_model(SHAPE, len(ITEMS)), config.Config(model=SHAPE), ITEMS, {})
    return directory


@pytest.fixture
def signed(unsigned: Path, keys: Path) -> Path:
    sign(unsigned, keys / "one")
    return unsigned


def assert_refused(
    directory: Path, keys_file: Path, reason: str | None = "is not a valid signature of the manifest"
) -> None:
    for use in (model_directory.load, model_directory.verified_tag):
        with pytest.raises(ArtifactError, match=reason):
            use(directory, keys_file)


def test_signing_does_not_change_a_model(signed: Path, keys: Path) -> None:
    assert model_directory.load(signed, keys / "one.pub").tag == model_directory.load(signed).tag
    assert model_directory.verified_tag(signed, keys / "one.pub") == model_directory.verified_tag(signed)


def test_changing_any_byte_of_any_file_is_detected(signed: Path, keys: Path) -> None:
    files = sorted(signed.iterdir())
    assert {MANIFEST, SIGNATURE, model_directory.WEIGHTS} < {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        for place in {0, len(content) // 3, len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 1
            file.write_bytes(changed)
            assert_refused(signed, keys / "one.pub", None)
        for other in (content + b"\n", content[:-1], b""):
            file.write_bytes(other)
            assert_refused(signed, keys / "one.pub", None)
        file.write_bytes(content)
    model_directory.load(signed, keys / "one.pub")


def test_a_forged_manifest_is_refused(signed: Path, keys: Path) -> None:
    (signed / model_directory.METRICS).write_text("{}\n\n")
    hashes = json.loads((signed / MANIFEST).read_text())
    hashes[model_directory.METRICS] = hashlib.sha256(b"{}\n\n").hexdigest()
    (signed / MANIFEST).write_text(json.dumps(hashes))
    model_directory.load(signed)
    assert_refused(signed, keys / "one.pub")


def test_a_forged_file_is_not_parsed(signed: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser may have bugs, or take all memory for a small file."""
    parsed: list[Path] = []

    def load_file(path: Path) -> None:
        parsed.append(path)
        raise ValueError("not a file of tensors")

    monkeypatch.setattr(model_directory, "load_file", load_file)
    (signed / WEIGHTS).write_bytes(b"forged")
    for keys_file, expected in ((None, [signed / WEIGHTS]), (keys / "one.pub", [])):
        parsed.clear()
        with pytest.raises(ArtifactError, match=f"{WEIGHTS} does not match its manifest"):
            model_directory.load(signed, keys_file)
        assert parsed == expected


def test_without_keys_no_signature_is_required(unsigned: Path, keys: Path) -> None:
    tag = model_directory.load(unsigned).tag
    assert_refused(unsigned, keys / "one.pub", "is not signed.*lisarec sign")
    (unsigned / SIGNATURE).write_bytes(b"whatever")
    assert model_directory.load(unsigned).tag == tag
    assert_refused(unsigned, keys / "one.pub")


def test_keys_are_rotated(signed: Path, keys: Path, tmp_path: Path) -> None:
    """In order: add the new public key, sign models with it, remove the old public key."""
    both, other = tmp_path / "both", shutil.copytree(signed, tmp_path / "other")
    sign(other, keys / "two")
    both.write_bytes((keys / "one.pub").read_bytes() + b"\nsome words\n" + (keys / "two.pub").read_bytes())
    for directory in (signed, other):
        model_directory.load(directory, both)
    model_directory.load(other, keys / "two.pub")
    assert_refused(signed, keys / "two.pub")
    assert_refused(other, keys / "one.pub")


def test_a_rewritten_model_is_unsigned(signed: Path, keys: Path) -> None:
    loaded = model_directory.load(signed)
    model_directory.save(signed, loaded.model, loaded.config, ITEMS, {"took": "longer"})
    assert_refused(signed, keys / "one.pub", "is not signed")


def test_a_signature_must_be_a_file(signed: Path, keys: Path) -> None:
    (signed / SIGNATURE).unlink()
    os.mkfifo(signed / SIGNATURE)
    assert_refused(signed, keys / "one.pub", "is not signed")


class TestOpenSsl:
    def test_verifies_our_signatures(self, signed: Path, keys: Path) -> None:
        verify = ("pkeyutl", "-verify", "-pubin", "-rawin", "-in", signed / MANIFEST, "-sigfile", signed / SIGNATURE)
        assert openssl(*verify, "-inkey", keys / "one.pub").returncode == 0
        assert openssl(*verify, "-inkey", keys / "two.pub").returncode != 0

    def test_creates_keys_and_signatures_that_we_accept(self, unsigned: Path, tmp_path: Path) -> None:
        private, public = tmp_path / "private.pem", tmp_path / "public.pem"
        assert openssl("genpkey", "-algorithm", "ed25519", "-out", private).returncode == 0
        assert openssl("pkey", "-in", private, "-pubout", "-out", public).returncode == 0
        made = openssl("pkeyutl", "-sign", "-rawin", "-inkey", private, "-in", unsigned / MANIFEST)
        (unsigned / SIGNATURE).write_bytes(made.stdout)
        model_directory.load(unsigned, public)
        sign(unsigned, private)
        assert (unsigned / SIGNATURE).read_bytes() == made.stdout


class TestKeys:
    def test_a_new_key_overwrites_no_file(self, keys: Path, tmp_path: Path) -> None:
        private, public = (keys / "one").read_bytes(), tmp_path / "public"
        shutil.copy(keys / "one.pub", public)
        with pytest.raises(SignatureError, match="exists"):
            signatures.make_key(keys / "one", public)
        assert ((keys / "one").read_bytes(), public.read_bytes()) == (private, (keys / "one.pub").read_bytes())
        assert (keys / "one").stat().st_mode & 0o777 == 0o600
        made = signatures.make_key(tmp_path / "three", public)
        found = TrustedKeys.read(public)
        for file in (keys / "one", tmp_path / "three"):
            assert read_signing_key(file).public_key() in found
        assert made == signatures.key_id(read_signing_key(tmp_path / "three").public_key())
        assert read_signing_key(keys / "two").public_key() not in found

    def test_files_without_a_key_are_refused(self, unsigned: Path, keys: Path, tmp_path: Path) -> None:
        """No model loads then, signed or not."""
        rsa, encrypted = tmp_path / "rsa", tmp_path / "encrypted"
        assert openssl("genpkey", "-algorithm", "rsa", "-out", rsa).returncode == 0
        assert openssl("pkey", "-in", rsa, "-pubout", "-out", tmp_path / "rsa.pub").returncode == 0
        lock = ("-aes256", "-passout", "pass:word")
        assert openssl("pkey", "-in", keys / "one", *lock, "-out", encrypted).returncode == 0
        (tmp_path / "empty").touch()
        (tmp_path / "cut").write_bytes((keys / "one.pub").read_bytes()[:-30])
        (tmp_path / "wrong").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
        for name, reason in (
            ("rsa.pub", "not an Ed25519 key"),
            ("wrong", "not an Ed25519 key"),
            ("empty", "contains no public key"),
            ("cut", "contains no public key"),
            ("nowhere", "cannot be read"),
            ("rsa", "contains a private key"),
        ):
            assert_refused(unsigned, tmp_path / name, reason)
        for private in (rsa, encrypted, tmp_path / "empty", keys / "one.pub"):
            with pytest.raises(SignatureError, match="contains no Ed25519 private key"):
                read_signing_key(private)
