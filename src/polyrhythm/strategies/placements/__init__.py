"""Where servers run: each file is one rule."""
