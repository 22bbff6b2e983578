"""Files of data sets: fetched and verified, kept for the user, their formats and their doubles."""
