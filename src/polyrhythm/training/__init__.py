"""Training on one rank: optimizers, schedules, losses, averages, precision, checkpoints.

This package does not depend on other ranks.
"""
