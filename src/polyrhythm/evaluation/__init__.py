"""How good a model is, what it sees of a picture, and what several know together."""

from polyrhythm.evaluation.evaluate import ClassResult, Evaluation, evaluate

__all__ = ["ClassResult", "Evaluation", "evaluate"]
