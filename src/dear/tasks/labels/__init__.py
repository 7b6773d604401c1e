"""Labels: which look wrong."""
