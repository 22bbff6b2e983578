"""Strategies without a server, in which all workers average at every step."""
