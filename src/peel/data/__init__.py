"""Datasets, augmentation and loading."""
