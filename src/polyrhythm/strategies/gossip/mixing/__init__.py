"""Common parts of strategies with synchronous mixing among neighbors, in turns."""
