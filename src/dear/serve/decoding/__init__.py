"""Decoding of images in processes of their own: `Decoder` is the entry point."""

from __future__ import annotations

from dear.serve.decoding.decoder import Decoder, Upload
from dear.serve.decoding.pixels import Cost, Decoding

__all__ = ["Cost", "Decoder", "Decoding", "Upload"]
