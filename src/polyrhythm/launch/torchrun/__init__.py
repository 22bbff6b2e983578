"""Ranks that torchrun has started, on one host or several."""
