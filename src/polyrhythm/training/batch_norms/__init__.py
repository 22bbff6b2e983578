"""Batch normalization: every module is one choice, such as `ghost(size=32)`."""
