"""How good a model is."""

from polyrhythm.evaluation.evaluate import ClassResult, Evaluation, evaluate

__all__ = ["ClassResult", "Evaluation", "evaluate"]
