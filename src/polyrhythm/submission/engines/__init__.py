"""Engines: Slurm, Ray, Kubernetes, and ssh for people with a few machines; the folder is the list."""
