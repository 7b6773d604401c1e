"""The drawings of the world's subjects, one module per family, composed of simple parts."""
