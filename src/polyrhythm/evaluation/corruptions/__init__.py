"""The corruptions, one a file."""
