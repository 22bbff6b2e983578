"""The verbs as Python functions: train, evaluate, and a training loop of your own."""
