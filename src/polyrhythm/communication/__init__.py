"""Communication: the communicator and clock that strategies are written against, and the transports behind them."""
