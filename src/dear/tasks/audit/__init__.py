"""Audit: image properties and concepts associated with the labels, and what a model relies on."""
