"""Optimizers that look at the network and at all workers' data, and not at their mean gradient alone: one a file."""
