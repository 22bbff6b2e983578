"""A forward and a backward pass: what is minimised, in which precision, and how the network is run."""
