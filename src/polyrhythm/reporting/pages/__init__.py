"""HTML pages that open offline: the report of a run, and of robustness tests."""
