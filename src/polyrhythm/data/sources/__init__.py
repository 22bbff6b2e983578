"""The data sets, one a file: each has `load() -> Dataset`."""
