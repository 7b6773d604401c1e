"""An HTTP service for many adapters over one backbone, answered in mixed batches."""

from __future__ import annotations

from dear.serve.settings import Limits, ServeSettings

__all__ = ["Limits", "ServeSettings"]
