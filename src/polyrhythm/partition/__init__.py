"""One model over several ranks: fully connected layers cut by their neurons."""
