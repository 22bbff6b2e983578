"""Duties of the coordinator besides training: tests, checkpoints and reports of the run."""
