"""Every shard on two servers, so that one of them may be lost."""
