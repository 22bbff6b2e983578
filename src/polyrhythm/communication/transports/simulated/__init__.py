"""All ranks as greenlets of one process, under virtual time."""
