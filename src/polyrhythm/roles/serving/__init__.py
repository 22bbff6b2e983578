"""What a server does beside what its part decides: states, replies, reports, refusals."""
