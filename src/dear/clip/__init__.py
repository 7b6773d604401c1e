"""The frozen CLIP towers: configuration, weights, text and image input."""

from dear.clip.config import ClipConfig, TextConfig, TowerConfig, VisionConfig
from dear.clip.model import Clip, TextTower, VisionTower
from dear.clip.tower import BlockMask, Edit, LayerEdit, LowRank, Record, Tower

__all__ = [
    "BlockMask",
    "Clip",
    "ClipConfig",
    "Edit",
    "LayerEdit",
    "LowRank",
    "Record",
    "TextConfig",
    "TextTower",
    "Tower",
    "TowerConfig",
    "VisionConfig",
    "VisionTower",
]
