"""Optimisers over one flat vector: their plans, which travel, their states, and slices of both."""
