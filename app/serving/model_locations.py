"""The locations of models: directories on this machine, or a bucket."""

from __future__ import annotations

from pathlib import Path

from app.serving.model_registry import LocalModels, ModelRegistry
from app.settings import StoreSettings
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from storage.folders.place import Place


def models_of(settings: StoreSettings) -> ModelRegistry:
    """Return the models that can be activated."""
    return models_at(settings.models_folder, settings)


def load_model(place: Place, settings: StoreSettings) -> Artifact:
    """Load the model directory at that place, signed by one of the keys in the settings' file if they name one.

    raises  NoSuchModel, ArtifactError  when it cannot be loaded
    """
    if isinstance(place, Path):
        return model_directory.load(place, settings.model_keys_file)
    return models_at(place.parent, settings).load(place.name)


def models_at(place: Place, settings: StoreSettings) -> ModelRegistry:
    """Return the models in the folder at that place."""
    if isinstance(place, Path):
        return LocalModels(place, settings.model_keys_file)
    from app.serving.bucket_models import BucketModels  # import the library only if there is a bucket

    return BucketModels(place, settings.cache_dir, settings.model_keys_file)
