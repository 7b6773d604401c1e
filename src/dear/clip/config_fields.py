"""Fields of a checkpoint's configuration file, each checked and the file named in every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.errors import CheckpointError

Section = Mapping[str, Any]


def section(value: Any, source: str) -> Section:
    """An object of the file."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: is not the configuration of a CLIP (an object was expected)")
    return value


def integer(fields: Section, key: str, source: str) -> int:
    """An integer."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} = {value!r} must be an integer")
    return value


def real(fields: Section, key: str, source: str) -> float:
    """A positive number."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4:
        raise CheckpointError(f"{source}: {key} = {value!r} must be a positive number")
    return float(value)


def flag(fields: Section, key: str, source: str, usual: bool = False) -> bool:
    """True or false."""
    value = fields.get(key, usual)
    need(isinstance(value, bool), source, f"{key} = {value!r}, which is neither true nor false")
    return bool(value)


def side(fields: Section, key: str, source: str) -> int:
    """An image's or patch's side; a pair must be square."""
    value = fields.get(key)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return integer({key: value}, key, source)


def color(value: Any, name: str) -> tuple[float, float, float]:
    """Three numbers, one per color."""
    if isinstance(value, list | tuple) and len(value) == 3:
        r, g, b = value
        if all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e6 for v in value):
            return float(r), float(g), float(b)
    raise CheckpointError(f"the {name} of the images must be three numbers, not {value!r}")


def need(condition: bool, source: str, fault: str) -> None:
    """Refuse what is not supported."""
    if not condition:
        raise CheckpointError(f"{source}: asks for {fault}, which is not supported")


def build_config(
    source: str, *, vision: dict[str, Any], text: dict[str, Any], embed_dim: int, images: dict[str, Any]
) -> ClipConfig:
    """A `ClipConfig`; errors about its values name the file."""
    try:
        images = {**images, "mean": color(images["mean"], "mean"), "std": color(images["std"], "std")}
        return ClipConfig(VisionConfig(**vision), TextConfig(**text), embed_dim, **images)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
