"""Search over the options of a run: what may be chosen, and what is tried next."""
