"""What a run keeps: checkpoints of all ranks, read back whole, cut anew where the number of ranks has changed."""
