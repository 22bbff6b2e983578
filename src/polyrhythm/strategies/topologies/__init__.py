"""Who talks to whom: one file a graph. The folder is the list."""
