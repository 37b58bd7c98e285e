"""Trained networks cut, repaired and fine-tuned: peel against Torch-Pruning on CIFAR-10."""
