"""A cut network from unlabeled images: channel selection, sensitivity, refitted layers."""
