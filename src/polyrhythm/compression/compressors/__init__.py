"""Compressors: one file an algorithm. The folder is the list."""
