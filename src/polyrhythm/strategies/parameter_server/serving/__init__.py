"""Common parts of strategies with servers: the two ends of push and pull."""
