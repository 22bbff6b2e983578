"""Interface of merge rules."""
