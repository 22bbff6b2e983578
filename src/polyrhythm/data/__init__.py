"""Data: where images and labels come from, and how every worker gets its own share of them, batch by batch.

`open.open_data` gives a `dataset.Dataset`; a `loader.Loader` turns its training split into batches.
"""
