"""Going on without a worker that is lost, or with one that has come, where all must agree on who goes on."""
