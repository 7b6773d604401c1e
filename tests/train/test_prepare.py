"""What `prepare` decides before a training: it asks the built method, and no option name is special."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dear
import dear.shortcuts.edit_plan
import dear.train.setup.prepare as setup
from dear.bench.cells import resolve_defaults
from dear.clip import Clip
from dear.errors import UsageError
from dear.methods import METHODS
from dear.methods.base import Method
from dear.runs.spec import Spec
from dear.shortcuts.edit_plan import plan_edits
from dear.train.setup.prepare import prepare

GUIDE = Path(__file__).parents[2] / "docs/extending.md"
DATA = {"data": "world:textures", "shots": 2}


@pytest.fixture(scope="module")
def mini() -> Clip:
    return dear.load("mini")


@pytest.fixture
def guide() -> Iterator[None]:
    """The methods of docs/extending.md, in the table of methods."""
    session: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)[:3]:
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), session)
    METHODS["head-scale"] = session["HeadScale"]
    yield
    METHODS.pop("taskres", None)
    METHODS.pop("head-scale", None)


@pytest.mark.usefixtures("guide")
def test_a_method_that_sets_its_cut_in_build_trains_on_random_views(mini: Clip) -> None:
    job = prepare(Spec(method="head-scale", **DATA), clip=mini)
    assert job.recipe.augment
    assert "augment" not in resolve_defaults(Spec(method="head-scale", **DATA)).recipe  # `prepare` decides
    assert not prepare(Spec(method="taskres", **DATA), clip=mini).recipe.augment


@pytest.mark.usefixtures("guide")
def test_a_method_inside_the_tower_learns_from_edited_copies(mini: Clip) -> None:
    job = prepare(Spec(method="head-scale", without=("brightness",), **DATA), clip=mini)
    assert job.edits is not None
    assert job.edits.copies


def test_an_instance_that_reads_features_alone_draws_no_views(mini: Clip) -> None:
    job = prepare(Spec(method="clip-lora", options={"towers": "text"}, **DATA), clip=mini)
    assert job.method.cut == "feature"
    assert not job.recipe.augment
    assert prepare(Spec(method="clip-lora", **DATA), clip=mini).recipe.augment


@dataclass(frozen=True)
class PlainConfig:
    focus: float = 0.5
    views: int = 3


class PlainOptions(Method):
    """A method whose options have the names of others' capabilities."""

    name, title, Config = "plain-options", "PlainOptions", PlainConfig

    def build(self, generator: torch.Generator) -> None:
        self.shift = self.learn(torch.zeros_like(self.prompts.frozen))

    def texts(self) -> Tensor:
        return self.prompts.frozen + self.config.focus * self.config.views * self.shift


def test_options_called_focus_and_views_are_ordinary(mini: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "plain-options", PlainOptions)
    job = prepare(Spec(method="plain-options", options={"focus": 0.25}, **DATA), clip=mini)
    assert (job.method.config.focus, job.method.config.views) == (0.25, 3)
    assert job.method.focus == ()
    with pytest.raises(UsageError, match="plain-options"):
        prepare(Spec(method="plain-options", focus="location", **DATA), clip=mini)


def test_concepts_and_properties_are_removed_together_from_many_images(
    mini: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dear.shortcuts.edit_plan, "MAX_IMAGES", 6)  # fewer than the training images
    by_directions = partial(_plan_by_directions, plan_edits)
    monkeypatch.setattr(setup, "plan_edits", by_directions)
    spec = Spec(method="linear-probe", without=("location", "brightness"), way="words", **DATA)
    job = prepare(spec, clip=mini)
    assert job.removed_concepts is not None
    assert job.method.clip.correction is not None


def _plan_by_directions(plan: Any, clip: Clip, images: Any, kinds: Any, way: str, *rest: Any) -> Any:
    return plan(clip, images, kinds, "directions", *rest)
