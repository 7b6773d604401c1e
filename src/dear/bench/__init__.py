"""Protocols, grids of results and tables."""
