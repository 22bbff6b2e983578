"""Parts of asynchronous pairwise averaging."""
