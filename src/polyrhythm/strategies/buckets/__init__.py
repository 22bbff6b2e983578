"""Gradients, averaged and applied bucket by bucket: when each travels, and when its update is made."""
