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
from dear.data.world.served import WorldPictures, task
from dear.data.world.tasks import list_tasks
from dear.data.world.vocabulary import vocabulary_ids

__all__ = [
    "CaptionTable",
    "Captions",
    "Scenes",
    "WorldPictures",
    "held_out",
    "list_tasks",
    "render",
    "sample",
    "task",
    "true_of",
    "vocabulary_ids",
]
