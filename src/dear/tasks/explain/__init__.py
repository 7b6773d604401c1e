"""Explain: why an image gets its answer, as exact contributions of heads and image regions."""
