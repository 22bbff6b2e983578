"""Decoded images that are kept: on disk for later runs, in memory for this one."""
