"""Pages of HTML that open offline: the report of a run, and what pictures may suffer."""
