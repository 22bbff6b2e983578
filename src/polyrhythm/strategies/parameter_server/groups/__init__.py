"""Parts of mixed mode: synchronous groups of workers; one member of each communicates with the servers."""
