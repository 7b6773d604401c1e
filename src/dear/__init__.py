"""Adapt CLIP-like vision-language models head by head."""

from dear.clip import Clip, ClipConfig

__version__ = "0.1.0"
__all__ = ["Clip", "ClipConfig"]
