"""What the strategies with servers share: the two ends of push and pull."""
