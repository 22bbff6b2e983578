"""What can go wrong in a simulated run: each file is one kind of fault."""
