"""Strategies with servers: workers push gradients and pull parameters."""
