"""Means of weights: of one run as it goes on, or of several networks."""
