"""The checks of `benchmarks/gpu/check.py`, one module a part."""
