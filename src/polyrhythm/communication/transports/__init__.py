"""The transports: each makes communicators of one world."""
