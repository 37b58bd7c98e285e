"""Helpers that know nothing of pruning: files, hashes, random numbers, environment variables."""
