"""What can go wrong in a simulated run: faults, and what carries them out."""
