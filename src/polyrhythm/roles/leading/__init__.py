"""Duties of the coordinator in addition to training: tests, checkpoints and reports of the run."""
