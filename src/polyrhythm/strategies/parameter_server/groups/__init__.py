"""What mixed mode is made of: groups of workers that go in step, of each of which one speaks to the servers."""
