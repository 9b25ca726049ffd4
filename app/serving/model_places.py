"""Where models are: directories of this machine, or a bucket."""

from __future__ import annotations

from pathlib import Path

from app.serving.model_registry import LocalModels, ModelRegistry
from app.settings import StoreSettings
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from storage.folders.place import Place


def models_of(settings: StoreSettings) -> ModelRegistry:
    """Return the models that can be activated."""
    return models_at(settings.models_folder, settings.cache_dir)


def load_model(place: Place, cache: Path) -> Artifact:
    """Read the model directory at that place.

    raises  NoSuchModel, ArtifactError  when that cannot be done
    """
    return model_directory.load(place) if isinstance(place, Path) else models_at(place.parent, cache).load(place.name)


def models_at(place: Place, cache: Path) -> ModelRegistry:
    """Return the models in the folder at that place."""
    if isinstance(place, Path):
        return LocalModels(place)
    from app.serving.bucket_models import BucketModels  # who has no bucket does not load its library

    return BucketModels(place, cache)
