"""Tar files that are read as a stream: an index of what is in them, and the order in which they are read."""
