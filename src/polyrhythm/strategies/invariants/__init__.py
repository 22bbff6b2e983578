"""What strategies declare of themselves: each file is one invariant."""
