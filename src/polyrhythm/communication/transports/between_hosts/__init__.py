"""Collectives over TCP between hosts, by the exchange of Deep Image."""
