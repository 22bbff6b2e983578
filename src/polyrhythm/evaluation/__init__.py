"""Evaluation: accuracy of a model, views of a picture, ensembles, and robustness against distorted pictures."""

from polyrhythm.evaluation.evaluate import ClassResult, Evaluation, evaluate

__all__ = ["ClassResult", "Evaluation", "evaluate"]
