"""The embedded backbone `mini`: its training on the attribute world, and how good it is there."""
