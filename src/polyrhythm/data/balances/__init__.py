"""Sharing of a global batch among synchronous workers; every module is one choice."""
