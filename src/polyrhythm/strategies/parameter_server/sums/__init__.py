"""What Downpour is made of: sums of gradients that are pushed, and parameters that are fetched, each when it is due."""
