"""What hierarchical servers are made of: leaves, each with a group of workers, and roots that hold the parameters."""
