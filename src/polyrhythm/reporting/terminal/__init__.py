"""Progress for whoever watches the run: live on a terminal, plain lines elsewhere."""
