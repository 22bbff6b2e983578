"""The typed configuration of a run, recipes, and how both become a job."""
