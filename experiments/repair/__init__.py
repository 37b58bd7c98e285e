"""Repair of a network that somebody else trained."""
