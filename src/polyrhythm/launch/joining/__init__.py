"""Joining a running job by hand: the join server, which admits who knows the run's token, and its client."""
