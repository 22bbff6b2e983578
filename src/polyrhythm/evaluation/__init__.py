"""Evaluation: accuracy of a model, views of an image, ensembles, and robustness against distorted images."""

from polyrhythm.evaluation.evaluate import ClassResult, Evaluation, evaluate

__all__ = ["ClassResult", "Evaluation", "evaluate"]
