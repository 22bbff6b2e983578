"""Weights that others trained: every module in this folder is where some come from."""
