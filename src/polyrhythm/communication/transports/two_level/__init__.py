"""Collectives over several hosts, some with several ranks."""
