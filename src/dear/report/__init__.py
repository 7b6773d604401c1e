"""Shared components of pages: figures, the map of heads, tables, galleries, and templates."""
