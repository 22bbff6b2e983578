"""Communication graphs: one file a graph. The folder is the list."""
