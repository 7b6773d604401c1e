"""Checked access to the fields of a checkpoint's configuration file; errors name the file."""

from __future__ import annotations

from typing import Any

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.errors import CheckpointError


class Fields(dict[str, Any]):
    """An object of the file."""

    def __init__(self, value: Any, source: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{source}: the configuration of a CLIP must be an object, got {value!r:.40}"
            )
        super().__init__(value)
        self.source = source

    def section(self, key: str) -> Fields:
        """A nested object; empty if it is missing."""
        value = self.get(key)
        return Fields({} if value is None else value, self.source)

    def with_defaults(self, defaults: dict[str, Any]) -> Fields:
        """The same fields, with defaults for missing ones."""
        return Fields({**defaults, **self}, self.source)

    def integer(self, key: str) -> int:
        """An integer."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.source}: {key} must be an integer, got {value!r}")
        return value

    def real(self, key: str) -> float:
        """A positive number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4:
            raise CheckpointError(f"{self.source}: {key} must be above 0 and below 10,000, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; false if it is missing."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {key} must be true or false, got {value!r}")
        return value

    def side(self, key: str) -> int:
        """The side of an image or a patch: an integer, or a list of two equal ones."""
        value = self.get(key)
        if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        return Fields({key: value}, self.source).integer(key)

    def require(self, condition: bool, setting: str) -> None:
        """Refuse an unsupported setting."""
        if not condition:
            raise CheckpointError(f"{self.source}: {setting} is not supported")


def build_config(
    source: str, *, vision: dict[str, Any], text: dict[str, Any], embed_dim: int, images: dict[str, Any]
) -> ClipConfig:
    """A `ClipConfig`; errors about its values name the file."""
    try:
        images = {**images, "mean": _color(images["mean"], "mean"), "std": _color(images["std"], "std")}
        return ClipConfig(VisionConfig(**vision), TextConfig(**text), embed_dim, **images)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _color(value: Any, name: str) -> tuple[float, float, float]:
    """Three numbers, one per color."""
    if isinstance(value, list | tuple) and len(value) == 3:
        r, g, b = value
        if all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e6 for v in value):
            return float(r), float(g), float(b)
    raise CheckpointError(f"{name} of the images must be three numbers, got {value!r}")
