"""The frozen CLIP towers: configuration, weights, text and image input."""

from dear.clip.config import ClipConfig, TextConfig, TowerConfig, VisionConfig
from dear.clip.edit import BlockMask, Edit, LayerEdit, LowRank, Record
from dear.clip.model import Clip
from dear.clip.tower import Tower
from dear.clip.towers import TextTower, VisionTower

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
