"""Probabilities one can act on: temperatures, thresholds for rejection, and nearness to training images."""
