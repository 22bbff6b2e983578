"""Parts of mixed mode: synchronous groups of workers; one member of each speaks to the servers."""
