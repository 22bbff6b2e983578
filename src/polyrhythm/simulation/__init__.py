"""Runs in virtual time: the same roles and strategies, all ranks in one process."""
