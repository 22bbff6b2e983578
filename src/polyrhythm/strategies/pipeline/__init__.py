"""Strategies with workers that hold stages of one network, and pass microbatches on."""
