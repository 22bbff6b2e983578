"""Placement of servers: each file is one rule."""
