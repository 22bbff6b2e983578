"""What strategies share that mix with their neighbours in turns, all workers in step."""
