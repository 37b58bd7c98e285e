"""What widths cost: MACs, parameters, activation memory; budgets, and widths that meet them."""
