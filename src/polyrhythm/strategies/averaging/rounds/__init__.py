"""Common parts of averaging strategies: rounds of local steps, each ended by a mean of all models."""
