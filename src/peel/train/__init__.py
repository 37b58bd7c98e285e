"""Training: one loop for every stage. Nothing here knows about pruning."""
