"""Augmentation: random changes of training images, so that a model sees each of them in many forms."""
