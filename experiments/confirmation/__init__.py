"""The confirmation of the chosen search: fresh seeds, test images, other data, one more network."""
