"""Verification: what must hold after every event of a run, for every strategy and for each family of them."""
