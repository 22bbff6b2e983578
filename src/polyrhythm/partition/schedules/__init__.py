"""The order in which a pipeline's ranks work through microbatches: one file a schedule. The folder is the list."""
