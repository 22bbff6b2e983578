"""The formats of exported networks, one a file."""
