"""The folder that models are activated from, by name; nothing outside it can be loaded."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from app.schemas.fields import Id
from app.serving import empty_model
from model.artifact import model_directory
from model.artifact.model_directory import Artifact, ArtifactError

NAME = TypeAdapter[str](Id)


class NoSuchModel(ValueError):
    """No model of that name is in the folder; the message names the folder and the models in it."""


def load_named(folder: Path, name: str) -> Artifact:
    """Read the model directory of that name.

    raises  NoSuchModel    when it is not there
            ArtifactError  when it cannot be read, is broken or of another version, or a link leads out of the folder
    """
    try:
        if not _is_name(name) or not (folder / name).is_dir():
            there = ", ".join(names(folder)) or "none"
            raise NoSuchModel(f"there is no model {name!r} in '{folder}', which has: {there}")
        for place in (folder / name, *(folder / name).iterdir()):
            if not place.resolve().is_relative_to(folder.resolve()):
                raise ArtifactError(f"'{place}' leads out of the folder of models; copy the model there")
        return model_directory.load(folder / name)
    except (OSError, RuntimeError) as exc:  # resolve() has the latter for a link that leads round in a circle
        raise ArtifactError(f"'{folder / name}' cannot be read ({exc}); mend it, or copy the model again") from exc


def names(folder: Path) -> list[str]:
    """Return the names of the complete models in the folder."""
    if not folder.is_dir():
        return []
    return sorted(place.name for place in folder.iterdir() if _is_name(place.name) and model_directory.exists(place))


def _is_name(name: str) -> bool:
    try:
        NAME.validate_python(name)
    except ValidationError:
        return False
    return name != empty_model.NAME
