"""Strategies in which workers train on their own and average their models now and then."""
