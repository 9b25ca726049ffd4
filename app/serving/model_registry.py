"""The folder of models that can be activated by name; nothing outside it can be loaded."""

import shutil
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from app.schemas import fields
from app.serving import empty_model
from model.artifact import model_directory
from model.artifact.model_directory import Artifact, ArtifactError
from storage.folders.folder import Folder
from storage.folders.local_folder import LocalFolder


class NoSuchModel(ArtifactError):
    """No model with this name is in the folder; the message contains the folder and its models."""


class ModelRegistry(Protocol):
    """A folder of models.

    folder  the folder itself
    work    a directory on this machine where models are created, which may be the folder
    """

    folder: Folder
    work: Path

    def names(self) -> list[str]:
        """Return the names of the complete models in the folder; raise OSError if it cannot be read."""

    def path(self, name: str) -> Path:
        """Return the model directory with this name on this machine.

        raises  NoSuchModel    when it does not exist
                ArtifactError  when it cannot be read, or a link points outside the folder
        """

    def load(self, name: str) -> Artifact:
        """Load the model with this name.

        raises  NoSuchModel    when it does not exist
                ArtifactError  when it cannot be read, is damaged, has another version or lacks a required signature
        """

    def publish(self, name: str) -> None:
        """Put the model directory with this name, which is in `work`, into the folder; raise OSError if that fails."""

    def remove(self, name: str) -> None:
        """Remove a model from the folder, if it exists; raise OSError if that fails."""


class LocalModels(ModelRegistry):
    """A directory of model directories.

    keys_file  public keys, one of which must have signed each loaded model; None if no signature is required
    """

    def __init__(self, directory: Path, keys_file: Path | None = None) -> None:
        self._keys_file = keys_file
        self.folder = LocalFolder(directory)
        self.work = self._directory = directory

    @override
    def names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        places = self._directory.iterdir()
        return sorted(place.name for place in places if is_name(place.name) and model_directory.exists(place))

    @override
    def path(self, name: str) -> Path:
        directory = self._directory
        try:
            if not is_name(name) or not (directory / name).is_dir():
                raise no_such_model(directory, name, self.names())
            for place in (directory / name, *(directory / name).iterdir()):
                if not place.resolve().is_relative_to(directory.resolve()):
                    raise ArtifactError(f"'{place}' is outside the models folder; copy the model into it")
        except (OSError, RuntimeError) as exc:  # resolve() raises RuntimeError for a cycle of links
            raise self._unreadable(name, exc) from exc
        return directory / name

    @override
    def load(self, name: str) -> Artifact:
        try:
            return model_directory.load(self.path(name), self._keys_file)
        except (OSError, RuntimeError) as exc:
            raise self._unreadable(name, exc) from exc

    def _unreadable(self, name: str, exc: Exception) -> ArtifactError:
        return ArtifactError(f"'{self._directory / name}' cannot be read ({exc}); repair it, or copy the model again")

    @override
    def publish(self, name: str) -> None:
        pass  # models are created in this directory

    @override
    def remove(self, name: str) -> None:
        shutil.rmtree(self._directory / name, ignore_errors=True)


def no_such_model(folder: object, name: str, names: list[str]) -> NoSuchModel:
    """Return the error for a name that the folder does not contain."""
    return NoSuchModel(f"no model {name!r} in '{folder}'; existing models: {', '.join(names) or 'none'}")


def is_name(name: str) -> bool:
    """Return whether the name is valid for a model."""
    return fields.is_name(name) and name != empty_model.NAME
