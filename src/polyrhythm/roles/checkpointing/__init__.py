"""Saving of a run: checkpoints of all ranks, read back whole, resharded where the number of ranks has changed."""
