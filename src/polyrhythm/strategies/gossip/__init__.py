"""Gossip strategies: every worker communicates with its neighbors only."""
