"""Runs: their specification, their folder and how they answer images; no training."""
