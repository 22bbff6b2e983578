"""Common parts of gossip strategies with synchronous mixing among neighbors."""
