"""The typed configuration of a run, recipes, and the construction of a job from them."""
