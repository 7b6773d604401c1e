"""The drawings of the world's subjects, one module a family, composed of simple parts."""
