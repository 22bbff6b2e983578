"""Measurements of machines, written as cluster files for the simulator."""
