"""The attribute world: pictures whose every attribute is drawn, named and known.

>>> import torch
>>> from dear.data import world
>>> scenes = world.sample(2, torch.Generator().manual_seed(0))
>>> world.render(scenes).shape
torch.Size([2, 3, 64, 64])
"""

from dear.data.world.captions import Captions, CaptionTable, true_of
from dear.data.world.renderer import render
from dear.data.world.scenes import Scenes, held_out, sample

__all__ = ["CaptionTable", "Captions", "Scenes", "held_out", "render", "sample", "true_of"]
