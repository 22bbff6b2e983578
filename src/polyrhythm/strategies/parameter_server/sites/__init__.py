"""What Gaia is made of: sites, each with a full copy of the parameters, and what they tell each other."""
