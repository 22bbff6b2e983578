"""Faults of a simulated run: each file is one kind of fault."""
