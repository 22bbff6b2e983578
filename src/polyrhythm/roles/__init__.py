"""Programs of ranks: worker and server, the only training loops. The same in real and simulated runs."""
