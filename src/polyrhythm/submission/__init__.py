"""Jobs that an engine places, queues and starts again: what it is handed, and how ranks meet there."""
