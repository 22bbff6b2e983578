"""A user's script as the ranks of a run."""
