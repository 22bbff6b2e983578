"""Closed formulas for the cost of links, collectives, servers and slow ranks; pure functions."""
