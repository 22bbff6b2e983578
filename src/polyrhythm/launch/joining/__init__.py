"""Joining a running job by hand: the door that lets in who knows the run's token, and the way through it."""
