"""Compression of vectors before they are sent: compressors, residual memory, and the layout of payloads."""
