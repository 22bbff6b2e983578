"""What one rank needs to train: optimisers, schedules, losses, averages, precision, checkpoints.

Nothing in here knows that there are other ranks.
"""
