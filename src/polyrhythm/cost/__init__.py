"""Closed formulas: what links, collectives, servers and slow ranks cost; pure functions."""
