"""A training loop of the user's own: the objects that `join` returns, and their coordination in the background."""
