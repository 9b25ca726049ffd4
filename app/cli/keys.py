"""Commands for API keys, for seal keys, and for the keys that sign models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import error_console, say
from app.cli.option_groups import ungrouped
from app.cli.options import store_settings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

cli = typer.Typer(help="Manage API keys, seal keys and model-signing keys.", no_args_is_help=True)
KeysFileOption = Annotated[
    Path | None,
    typer.Option("--keys", help="File of the API keys. Default: LISAREC_KEYS_FILE, else keys.", metavar="FILE"),
]

OPTIONS: Mapping[int | str, str] = {
    "tenant": "--tenant",
    "origins": "--origin",
    "requests_per_minute": "--rate",
    "new_users_per_hour": "--new-users",
    "event_types": "--event-type",
    "note": "--note",
    "audience": "--audience",
}
"""The options of `lisarec keys add` by the field of a key that they set."""

SignedModel = Annotated[Path, typer.Argument(help="Model directory on this machine.", metavar="DIR")]


@dataclass(frozen=True)
class LimitOptions:
    """Options for the limits of a key."""

    rate: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Plain requests per minute. An event counts as one, an expensive call as several. Default: unlimited.",
        ),
    ] = None
    new_users: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Maximum number of new users per hour. Default: that of the tenant, or of its page keys together.",
        ),
    ] = None
    event_type: Annotated[
        list[str] | None,
        typer.Option(
            help="Type of events that the key may post, such as view. Repeatable. Default: all.", metavar="TYPE"
        ),
    ] = None

    def fields(self) -> dict[str, object]:
        """Return the fields of a key that these options set."""
        return {
            "requests_per_minute": self.rate,
            "new_users_per_hour": self.new_users,
            "event_types": self.event_type or (),
        }


@cli.command("add")
@ungrouped
def add_key(
    *,
    scope: Annotated[list[str], typer.Option(help="Scope, such as events:write or recs:read. Repeatable.")],
    keys: KeysFileOption = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the key. Default: LISAREC_TENANT, else main.")] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin that may use the key, such as https://shop.example. Repeatable."),
    ] = None,
    limits: LimitOptions,
    note: Annotated[str, typer.Option(help="Free-text note, such as who uses the key.")] = "",
    audience: Annotated[
        str,
        typer.Option(help="Audience of sealed states: the key opens only states of the same audience. Default: none."),
    ] = "",
) -> None:
    """Create an API key and print it once. The file stores its hash; services pick it up within a second."""
    from pydantic import ValidationError

    from app.http.auth import keys as keyring

    file = _keys_file(keys)
    known = ", ".join(keyring.SCOPES)
    if unknown := sorted(set(scope) - set(keyring.SCOPES)):
        raise typer.BadParameter(f"unknown scope {unknown[0]!r}; valid scopes: {known}")
    scopes = [one for one in keyring.SCOPES if one in scope]
    try:
        whose = tenant or store_settings().tenant
        text, key = keyring.make(whose, scopes, origin or (), note=note, audience=audience, **limits.fields())
    except ValidationError as exc:
        raise typer.BadParameter("; ".join(map(_problem, exc.errors()))) from None
    keyring.add(file, key)
    created = f"created key {key.id} for tenant {key.tenant} in '{file}'. Store it now, it is shown only once:"
    say(created, to=error_console)
    say(text)


def _problem(error: ErrorDetails) -> str:
    """Return the option that a key's faulty field comes from, and the reason; it does not quote the value."""
    option = OPTIONS.get(error["loc"][0], "") if error["loc"] else ""
    return f"{option}{': ' if option else ''}{error['msg'].removeprefix('Value error, ')}"


@cli.command("list")
def list_keys(keys: KeysFileOption = None) -> None:
    """List the API keys: ids, tenants, scopes, origins, limits and notes. The keys themselves are not stored."""
    from app.http.auth.keys import read

    for key in read(_keys_file(keys)):
        rate = "" if key.requests_per_minute is None else f"{key.requests_per_minute}/min"
        new_users = "" if key.new_users_per_hour is None else f"{key.new_users_per_hour} new users/h"
        types = f"only {','.join(key.event_types)}" if key.event_types else ""
        words = (key.id, key.tenant, ",".join(key.scopes), *key.origins, rate, new_users, types, key.note)
        say("  ".join(filter(None, words)))


@cli.command("remove")
def remove_key(
    key_id: Annotated[str, typer.Argument(help="Id of the key, from 'lisarec keys list'.", metavar="ID")],
    keys: KeysFileOption = None,
) -> None:
    """Revoke an API key. Services pick this up within a second."""
    from app.http.auth.keys import remove

    remove(_keys_file(keys), key_id)
    say(f"revoked key {key_id}")


@cli.command("seal")
def rotate_seal_keys(
    seal_keys: Annotated[
        Path | None,
        typer.Option(help="File of the seal keys. Default: LISAREC_SEAL_KEYS_FILE, else seal_keys.", metavar="FILE"),
    ] = None,
    keep: Annotated[int, typer.Option(min=2, help="Maximum number of keys to keep in the file.")] = 4,
) -> None:
    """Create the keys that seal visitors' states, or rotate them. Services pick this up within a second.

    The file's second key becomes the sealing key, and a new key becomes the second. So services have each key before
    it is used.
    """
    from app.http.auth.seal_keys import rotate

    file = seal_keys or store_settings().seal_keys_file or Path("seal_keys")
    sealing, following, *older = [key.id.hex() for key in rotate(file, keep)]
    opening = f"; older keys still open states: {', '.join(older)}" if older else ""
    say(f"'{file}': sealing key {sealing}, next key {following}{opening}")


@cli.command("model")
def make_model_key(
    key: Annotated[
        Path | None,
        typer.Option(
            help="File for the new private key. Default: LISAREC_MODEL_SIGNING_KEY_FILE, else model_signing_key.pem.",
            metavar="FILE",
        ),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(
            help="File to add the public key to. Default: LISAREC_MODEL_KEYS_FILE, else model_keys.pem.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Create a key pair that signs models.

    Services with LISAREC_MODEL_KEYS_FILE load only models that are signed by a key in this file.
    """
    from model.artifact.signatures import make_key
    from storage.folders.local_folder import sync

    settings = store_settings()
    private_file = key or settings.model_signing_key_file or Path("model_signing_key.pem")
    public_file = public or settings.model_keys_file or Path("model_keys.pem")
    made = make_key(private_file, public_file)
    for place in (private_file, public_file, private_file.parent, public_file.parent):
        sync(place)
    say(
        f"created key {made}; sign with 'lisarec sign DIR --key {private_file}', "
        f"verify with LISAREC_MODEL_KEYS_FILE={public_file}"
    )


def sign(
    model: SignedModel,
    key: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the private key, from 'lisarec keys model'. Default: LISAREC_MODEL_SIGNING_KEY_FILE.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Sign a model directory, so that services that require a signature load it.

    The signature covers all files. A later change of a file invalidates it.
    """
    from model.artifact import model_directory, signatures
    from storage.folders.local_folder import sync

    file = key or store_settings().model_signing_key_file
    if file is None:
        raise typer.BadParameter("no private key; pass --key FILE, or create one with 'lisarec keys model'")
    private = signatures.read_signing_key(file)
    tag = model_directory.verified_tag(model)
    signatures.sign(model, (model / model_directory.MANIFEST).read_bytes(), private)
    sync(model)
    say(f"{model}: generation {tag} is signed by key {signatures.key_id(private.public_key())}")


def verify(
    model: SignedModel,
    keys: Annotated[
        Path | None,
        typer.Option(help="PEM file of trusted public keys. Default: LISAREC_MODEL_KEYS_FILE.", metavar="FILE"),
    ] = None,
) -> None:
    """Verify a model directory: its files against the manifest, and the manifest against its signature."""
    from model.artifact import model_directory

    file = keys or store_settings().model_keys_file
    tag = model_directory.verified_tag(model, file)
    signed = "signature not checked (no public keys given)" if file is None else f"signed by a key in '{file}'"
    say(f"{model}: generation {tag} is intact, {signed}")


def _keys_file(given: Path | None) -> Path:
    return given or store_settings().keys_file or Path("keys")
