"""Other tools' trainers, with every strategy: an optional dependency each."""
