"""Strategies that are compositions of a consistency, a merge rule and an aggregator."""
