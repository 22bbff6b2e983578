"""A run without a model, data or results, of which only time and traffic are left."""
