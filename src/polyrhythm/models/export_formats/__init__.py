"""The formats of exported networks, one per module."""
