"""A small state for the studio's tests: the embedded backbone, few images, a model trained in seconds."""

from __future__ import annotations

import functools

import dear
from dear.data import halves, open_data
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.methods import ZeroShot
from dear.runs.model import Model
from dear.studio.state import StudioState, examples
from dear.tasks.adapt import adapt


@functools.cache
def backbone():
    return dear.load("mini")


@functools.cache
def images():
    return examples(each=8)


@functools.cache
def model():
    """DeAR after a few steps on the first half of the vehicles."""
    clip = backbone()
    train = open_data("world:vehicles", "train")
    base = train.select_classes(halves(train.classes)[0])
    return adapt(base, backbone=clip, roles=roles(), shots=4, recipe={"epochs": 2}, calibrate=False).method


def roles():
    clip = backbone()
    return known_roles(clip) or RoleMap.uniform(
        "mixed", clip.config.vision.last_third, clip.config.vision.heads
    )


def state(folder, trained=True, local=True):
    zero_shot = Model(ZeroShot(backbone(), images().classes, template=images().template))
    new = StudioState(backbone(), roles(), images(), folder, zero_shot, local=local)
    if trained:
        new.use(model(), "a model of the tests")
    return new
