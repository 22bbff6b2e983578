"""How several gradients become one: each file is one rule."""
