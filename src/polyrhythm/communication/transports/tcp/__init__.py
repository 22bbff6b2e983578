"""Links between ranks of different hosts, or of one host where memory cannot be shared: sockets of our own."""
