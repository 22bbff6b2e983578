"""Faults of a simulated run, and their execution."""
