"""Interfaces of merge rules and aggregators, and their common parts."""
