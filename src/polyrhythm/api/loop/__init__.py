"""A training loop of the user's own, among others: what `join` gives, and what goes on behind it."""
