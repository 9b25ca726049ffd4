"""Commands that add, list and remove keys, and make and use those that seal states and sign models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from app.cli.console import error_console, say
from app.cli.option_groups import ungrouped
from app.cli.options import store_settings

cli = typer.Typer(help="Add, list and remove API keys, and rotate the keys that seal states.", no_args_is_help=True)
KeysFileOption = Annotated[
    Path | None, typer.Option("--keys", help="File of the keys. Default: LISAREC_KEYS_FILE, else keys.", metavar="FILE")
]

SignedModel = Annotated[Path, typer.Argument(help="Model directory on this machine.", metavar="DIR")]


@dataclass(frozen=True)
class LimitOptions:
    """How much may be done with a key."""

    rate: Annotated[
        int | None,
        typer.Option(
            min=1, help="Plain requests a minute. An event is one, a costly request several. Default: no limit."
        ),
    ] = None
    new_users: Annotated[
        int | None,
        typer.Option(min=0, help="New users an hour. Default: the tenant's quota, and half of it with --origin."),
    ] = None


@cli.command("add")
@ungrouped
def add_key(
    *,
    scope: Annotated[list[str], typer.Option(help="Scope, such as events:write or recs:read. Repeatable.")],
    keys: KeysFileOption = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the key. Default: LISAREC_TENANT, else main.")] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may use the key, such as https://shop.example. Repeatable."),
    ] = None,
    limits: LimitOptions,
    note: Annotated[str, typer.Option(help="Note for people, such as who has the key.")] = "",
    audience: Annotated[
        str,
        typer.Option(help="Audience: the key opens only sealed states of this audience. Default: of keys without one."),
    ] = "",
) -> None:
    """Make a key and print it once. The file gets its hash, and services pick it up within a second."""
    from pydantic import ValidationError

    from app.http.auth import keys as keyring

    file = _keys_file(keys)
    known = ", ".join(keyring.SCOPES)
    if unknown := sorted(set(scope) - set(keyring.SCOPES)):
        raise typer.BadParameter(f"no scope {unknown[0]!r}; there are: {known}")
    scopes = [one for one in keyring.SCOPES if one in scope]
    try:
        whose = tenant or store_settings().tenant
        text, key = keyring.make(whose, scopes, origin or (), limits.rate, limits.new_users, note, audience)
    except ValidationError as exc:
        raise typer.BadParameter("; ".join(error["msg"] for error in exc.errors())) from exc
    keyring.add(file, key)
    error_console.print(f"key {key.id} for {key.tenant}, in '{file}'; it is shown once:", highlight=False, markup=False)
    say(text)


@cli.command("list")
def list_keys(keys: KeysFileOption = None) -> None:
    """List the keys: ids, tenants, scopes, origins, limits and notes. The keys themselves are stored nowhere."""
    from app.http.auth.keys import read

    for key in read(_keys_file(keys)):
        rate = "" if key.requests_per_minute is None else f"{key.requests_per_minute}/min"
        new_users = "" if key.new_users_per_hour is None else f"{key.new_users_per_hour} new users/h"
        words = (key.id, key.tenant, ",".join(key.scopes), *key.origins, rate, new_users, key.note)
        say("  ".join(filter(None, words)))


@cli.command("remove")
def remove_key(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as 'lisarec keys list' shows it.", metavar="ID")],
    keys: KeysFileOption = None,
) -> None:
    """Revoke a key. Services pick this up within a second."""
    from app.http.auth.keys import remove

    remove(_keys_file(keys), key_id)
    say(f"key {key_id} is no longer valid")


@cli.command("seal")
def rotate_seal_keys(
    seal_keys: Annotated[
        Path | None,
        typer.Option(help="File of the seal keys. Default: LISAREC_SEAL_KEYS_FILE, else seal_keys.", metavar="FILE"),
    ] = None,
    keep: Annotated[int, typer.Option(min=2, help="Most keys that stay in the file.")] = 4,
) -> None:
    """Make the keys that seal visitors' states, or rotate them. Services pick this up within a second.

    The file's second key seals from now on, and a new key takes its place, so every service has a key before it seals.
    """
    from app.http.auth.seal_keys import rotate

    file = seal_keys or store_settings().seal_keys_file or Path("seal_keys")
    sealing, following, *older = [key.id.hex() for key in rotate(file, keep)]
    opening = f"; {', '.join(older)} open what they have sealed" if older else ""
    say(f"{sealing} seals, {following} is the next{opening}: '{file}'")


@cli.command("model")
def make_model_key(
    key: Annotated[
        Path | None,
        typer.Option(
            help="New file of the private key; default: LISAREC_MODEL_SIGNING_KEY_FILE, else model_signing_key.pem.",
            metavar="FILE",
        ),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(
            help="The public key is added to this file; default: LISAREC_MODEL_KEYS_FILE, else model_keys.pem.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Make a key that signs models.

    Services with LISAREC_MODEL_KEYS_FILE load the models that a key of this file has signed, and no others.
    """
    from model.artifact.signatures import make_key

    settings = store_settings()
    private_file = key or settings.model_signing_key_file or Path("model_signing_key.pem")
    public_file = public or settings.model_keys_file or Path("model_keys.pem")
    made = make_key(private_file, public_file)
    say(f"key {made}: 'lisarec sign DIR --key {private_file}' signs, and services load by '{public_file}'")


def sign(
    model: SignedModel,
    key: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the private key that 'keys model' made; default: LISAREC_MODEL_SIGNING_KEY_FILE.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Sign a model directory, so that services that ask for a signature load it.

    The signature covers all files. What is changed afterwards is no longer signed.
    """
    from app.settings import StoreSettings
    from model.artifact import model_directory, signatures

    file = key or StoreSettings().model_signing_key_file
    if file is None:
        raise typer.BadParameter("give the private key with --key FILE; 'lisarec keys model' makes one")
    private = signatures.read_signing_key(file)
    tag = model_directory.verified_tag(model)
    signatures.sign(model, (model / model_directory.MANIFEST).read_bytes(), private)
    say(f"{model}: generation {tag} is signed by key {signatures.key_id(private.public_key())}")


def verify(
    model: SignedModel,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of public keys that it may be signed by; default: LISAREC_MODEL_KEYS_FILE.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Compare the files of a model directory with its manifest, and the manifest with its signature."""
    from app.settings import StoreSettings
    from model.artifact import model_directory

    file = keys or StoreSettings().model_keys_file
    tag = model_directory.verified_tag(model, file)
    signed = "whose signature nobody asked for" if file is None else f"signed by a key of '{file}'"
    say(f"{model}: generation {tag} is whole, {signed}")


def _keys_file(given: Path | None) -> Path:
    return given or store_settings().keys_file or Path("keys")
