"""Common parts of elastic averaging: the center, a worker's end of it, and its stability."""
