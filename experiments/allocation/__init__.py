"""How much there is to win by allocation: many allocations of one budget, each trained from scratch."""
