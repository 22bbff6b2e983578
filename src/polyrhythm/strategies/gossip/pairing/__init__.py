"""What asynchronous averaging in pairs is made of."""
