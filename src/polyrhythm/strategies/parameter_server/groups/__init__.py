"""What mixed mode is made of: groups of workers that go in step, whose leaders alone talk to the servers."""
