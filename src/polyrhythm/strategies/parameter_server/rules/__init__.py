"""What merge rules and aggregators are, and what several of them share."""
