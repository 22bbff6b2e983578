"""What the strategies of elastic averaging share: the centre, a worker's end of it, and when it is stable."""
