"""The locations of models: directories on this machine, or a bucket."""

import logging
import shutil
from pathlib import Path

from app.serving import empty_model
from app.serving.model_registry import LocalModels, ModelRegistry, NoSuchModel, is_name
from app.settings import Settings, StoreSettings
from model.artifact import model_directory
from model.artifact.model_directory import Artifact, ArtifactError
from storage.folders.place import ObjectUrl, Place

logger = logging.getLogger(__name__)


def models_of(settings: StoreSettings) -> ModelRegistry:
    """Return the models that can be activated."""
    return models_at(settings.models_folder, settings)


def load_model(place: Place, settings: StoreSettings) -> Artifact:
    """Load the model directory at that place, signed by one of the keys in the settings' file if they name one.

    raises  NoSuchModel, ArtifactError  when it cannot be loaded
    """
    if not isinstance(place, Path):
        return models_at(place.parent, settings).load(place.name)
    try:
        return model_directory.load(place, settings.model_keys_file)
    except ArtifactError as exc:
        if model_directory.exists(place):
            raise
        raise NoSuchModel(str(exc)) from None


def load_models(settings: Settings) -> dict[str, Artifact]:
    """Load the model of each tenant of a service, or the empty model if it has none yet.

    Among several tenants, one whose model cannot be loaded gets the empty model, so that the others are served.

    raises  NoSuchModel, ArtifactError, OSError  when the model of the only tenant cannot be loaded
    """
    return {tenant: _model_of(tenant, place, settings) for tenant, place in settings.model_dirs.items()}


def _model_of(tenant: str, place: Place | None, settings: Settings) -> Artifact:
    if place is None:
        return empty_model.artifact()
    try:
        return load_model(place, settings)
    except (ArtifactError, OSError) as exc:
        if not settings.tenants:
            raise
        level = logging.WARNING if isinstance(exc, NoSuchModel) else logging.ERROR
        logger.log(level, "tenant %s starts without a model: %s", tenant, exc)
        return empty_model.artifact()


def models_at(place: Place, settings: StoreSettings) -> ModelRegistry:
    """Return the models in the folder at that place."""
    if isinstance(place, Path):
        return LocalModels(place, settings.model_keys_file)
    from app.serving.bucket_models import BucketModels  # import the library only if there is a bucket

    return BucketModels(place, settings.cache_dir, settings.model_keys_file)


class ModelOutput:
    """Where a training writes its model: a directory, or one on this machine whose model is uploaded to a bucket.

    directory    the model directory on this machine
    is_uploaded  whether the model is to be in a bucket
    is_finished  whether an earlier training has ended there, and its model only lacks the upload
    """

    def __init__(self, place: Place, settings: StoreSettings) -> None:
        """Raise ValueError if a bucket cannot take a model there, OSError if that cannot be read."""
        self._place = place
        self._models = models_at(place.parent, settings)
        self.directory = self._models.work / place.name
        self.is_uploaded = isinstance(place, ObjectUrl)
        if isinstance(place, ObjectUrl) and not (place.parent.name and is_name(place.name)):
            raise ValueError(f"'{place}' does not name a model in a bucket; use a URL such as s3://shop/models/june")
        self._refuse_another()
        self.is_finished = self.is_uploaded and model_directory.exists(self.directory)

    def _refuse_another(self) -> None:
        if self.is_uploaded and self._place.name in self._models.names():
            raise ValueError(f"'{self._place}' already contains a model; choose another --out, or delete it")

    def upload(self) -> None:
        """Put the model into the bucket, if it goes there, and remove it from this machine.

        raises  ValueError  when the bucket has a model of this name by now
                OSError     when the upload fails; the model stays on this machine
        """
        if not self.is_uploaded:
            return
        self._refuse_another()
        try:
            self._models.publish(self._place.name)
        except OSError as exc:
            raise OSError(f"the model was not uploaded; run the same command with --resume: {exc}") from exc
        shutil.rmtree(self.directory)
