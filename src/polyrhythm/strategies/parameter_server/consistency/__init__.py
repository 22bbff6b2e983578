"""Consistency: rules of progress for pushers; each file is one small state machine without a network."""
