"""Strategies without servers in which all workers average gradients at every step."""
