"""Sources of pretrained weights, one per module."""
