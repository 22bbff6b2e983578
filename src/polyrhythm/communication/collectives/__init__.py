"""Algorithms that move and reduce, each one file, written over point-to-point messages."""
