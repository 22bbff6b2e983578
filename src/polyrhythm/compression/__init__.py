"""How a vector is shrunk before it travels: compressors, what they keep back, and the layout of what is sent."""
