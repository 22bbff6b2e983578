"""The batch schedules: every module is one choice, such as `step(at=[0.5, 0.75], growth=2)`."""
