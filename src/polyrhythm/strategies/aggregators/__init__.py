"""Aggregation of several gradients into one: each file is one rule."""
