"""What workers send that mean harm, or are broken: each file is one attack."""
