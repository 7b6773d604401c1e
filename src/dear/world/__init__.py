"""The attribute world: images whose every attribute is drawn, named and known.

>>> import torch
>>> from dear import world
>>> scenes = world.sample(2, torch.Generator().manual_seed(0))
>>> world.render(scenes).shape
torch.Size([2, 3, 64, 64])
"""

from dear.world.captions import Captions, CaptionTable, matching_captions
from dear.world.renderer import render
from dear.world.scenes import Scenes, is_held_out, sample
from dear.world.shortcuts import list_shortcuts
from dear.world.tasks import list_tasks

__all__ = [
    "CaptionTable",
    "Captions",
    "Scenes",
    "is_held_out",
    "list_shortcuts",
    "list_tasks",
    "matching_captions",
    "render",
    "sample",
]
