"""Strategies whose workers hold stages of one network, and pass microbatches on."""
