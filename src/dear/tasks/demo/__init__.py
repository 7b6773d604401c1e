"""Demo: the whole story on the embedded backbone and the attribute world."""
