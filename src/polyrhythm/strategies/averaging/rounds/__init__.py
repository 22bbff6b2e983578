"""What averaging strategies share: rounds of local steps, each ended by a mean of all models."""
