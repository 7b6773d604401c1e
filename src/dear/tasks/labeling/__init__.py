"""Labeling: what to label next, answers on disk, exchange with Label Studio, the labeling page."""
