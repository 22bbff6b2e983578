"""Pictures: where they are, whether they can be read, and the numbers that they become."""
