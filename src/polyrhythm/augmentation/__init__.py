"""Augmentation: training images are changed at random, so that a model sees each of them in many forms."""
