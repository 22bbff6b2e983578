"""What a rank does: worker and server, the only training loops. The same in reality and in simulation."""
