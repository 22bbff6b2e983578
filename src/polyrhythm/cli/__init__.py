"""The command line: one file a verb; parses and prints, nothing else."""
