"""Attacks: messages of malicious or broken workers; each file is one attack."""
