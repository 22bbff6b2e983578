"""What a machine can do, measured: the file that simulations read."""
