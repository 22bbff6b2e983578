"""Who gets which image at which step, as pure functions of the seed."""
