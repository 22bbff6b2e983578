"""Dense evaluation: a network trained on small pictures, applied at every place of larger ones."""
