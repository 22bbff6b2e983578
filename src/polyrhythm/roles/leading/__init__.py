"""What the worker that leads does beside learning: it tests, saves, and speaks for the run."""
