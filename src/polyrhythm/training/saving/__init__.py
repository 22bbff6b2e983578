"""Checkpoints as files: written whole or not at all, read back with their sums checked."""
