"""Merge rules for gradients that were computed from older parameters: each file is one rule."""
