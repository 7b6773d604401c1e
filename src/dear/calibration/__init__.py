"""Calibration: temperatures, thresholds for rejection, and nearness to the training images."""
