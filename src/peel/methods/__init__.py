"""A method gets a `Problem` and answers with widths."""
