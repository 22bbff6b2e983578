"""The losses, one a file."""
