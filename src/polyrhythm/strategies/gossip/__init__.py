"""Workers that exchange with neighbours only: words travel, and nobody meets everybody."""
