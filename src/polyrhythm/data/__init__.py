"""Data: sources of labeled images, and the division of every epoch among the workers, batch by batch.

`open.open_data` returns a `dataset.Dataset`; a `loader.Loader` makes batches of its training split.
"""
