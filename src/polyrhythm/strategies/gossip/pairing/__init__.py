"""Parts of asynchronous averaging in pairs."""
