"""The data sets, one per module: each has `load() -> Dataset`."""
