"""Consumers of events: the log, live progress, TensorBoard and the one-file HTML report."""
