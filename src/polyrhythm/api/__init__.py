"""What the verbs do, for Python programs: train, evaluate, and your own loop."""
