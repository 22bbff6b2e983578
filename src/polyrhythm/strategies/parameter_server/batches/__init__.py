"""What Sandblaster is made of: batches of portions, and curvature kept in shards, of which scalars travel."""
