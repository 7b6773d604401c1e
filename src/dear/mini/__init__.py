"""The embedded backbone: how it is trained on the attribute world, and what it is measured to know."""
