"""Models by name, and their weights as files."""

from polyrhythm.models.create import create_model, model_names
from polyrhythm.models.weights import load_weights, read_metadata, save_weights

__all__ = ["create_model", "load_weights", "model_names", "read_metadata", "save_weights"]
