"""The frozen CLIP towers: configuration, weights, text and image input."""
