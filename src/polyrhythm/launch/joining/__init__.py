"""Joining a running job by hand: the join server, which admits clients with the run's token, and its client."""
