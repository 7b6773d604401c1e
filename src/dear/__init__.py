"""Adapt CLIP-like vision-language models head by head."""

__version__ = "0.1.0"
