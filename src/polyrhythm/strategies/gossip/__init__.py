"""Gossip: workers that exchange with their neighbors only."""
