"""Training: one plain loop for every stage. Nothing in here knows about pruning."""
