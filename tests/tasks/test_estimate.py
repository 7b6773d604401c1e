"""The estimated time of an adaptation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.methods import METHODS, find_method
from dear.runs.spec import Spec
from dear.train.calibrate import LEAST_IMAGES
from dear.train.fit import fit
from dear.train.frozen import FrozenViews
from dear.train.setup.estimate import WORTH_MEASURING, estimate
from dear.train.setup.prepare import Job, prepare

CLIP = tiny_clip(dtype=torch.float32)


def planned(method: str = "dear", each: int = 4, **changes: Any) -> Job:
    roles = mixed_roles() if find_method(method).uses_roles else None
    recipe = {"batch": 4, "epochs": 10, **changes.pop("recipe", {})}
    spec = Spec().changed(**{"method": method, "recipe": recipe, "calibrate": False, **changes})
    return prepare(spec, Colors(classes=3, each=each), clip=CLIP, roles=roles)


def delayed(usual: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        return usual(*given)

    return slow


def slow_first(usual: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count()

    def slow(*values: Any) -> Any:
        time.sleep(0 if next(calls) else 2.0)
        return usual(*values)

    return slow


def test_every_step_and_what_is_kept_of_it_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty steps, three batches per epoch; a batch's frozen stage takes 0.1 s, the rest nearly nothing."""
    kind = find_method("clip-adapter")
    for owner, name in ((kind, "frozen_stage"), (FrozenViews, "_compute")):
        monkeypatch.setattr(owner, name, delayed(getattr(owner, name)))
    plan = planned("clip-adapter", recipe={"augment": True})
    found, kept = estimate(plan), estimate(planned("clip-adapter", recipe={"augment": True, "views": 2}))
    assert found is not None
    assert kept is not None
    assert plan.steps == 30
    assert 3.0 <= found.training < 9.0  # a loaded machine adds to it
    assert 0.6 <= kept.training < 3.0  # two views of three batches
    assert found.calibration == kept.calibration == 0


def test_what_the_first_image_and_the_first_step_load_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first frozen stage and the first loss take two seconds more, as where libraries are loaded."""
    kind = find_method("clip-adapter")
    for owner, name in ((FrozenViews, "_compute"), (kind, "loss_from_frozen")):
        monkeypatch.setattr(owner, name, slow_first(getattr(owner, name)))
    expected = estimate(planned("clip-adapter", each=12, recipe={"augment": True, "views": 2}))
    assert expected is not None
    assert expected.training < 10.0  # counted, the delays add 18 and 180 seconds


def test_calibration_is_counted_as_its_trainings() -> None:
    found = estimate(planned(calibrate=True, recipe={"views": 0}))
    assert found is not None
    # Without each third of the images in turn, and one training without a quarter of the classes.
    assert found.calibration == pytest.approx((3 * 2 / 3 + 0.5) * found.training)
    cached = estimate(planned(calibrate=True, recipe={"views": 2}))
    assert cached is not None
    assert cached.calibration < 2.5 * cached.training  # what is frozen is computed once for all of them
    few = estimate(planned(each=3, calibrate=True, recipe={"epochs": 30}))
    assert LEAST_IMAGES > 3 * 3
    assert few is not None
    assert few.calibration == 0


def test_short_trainings_and_methods_without_steps_are_not_measured() -> None:
    short = planned("coop", recipe={"epochs": 1})
    assert short.steps < WORTH_MEASURING
    assert estimate(short) is None
    assert estimate(planned("zeroshot")) is None


@pytest.mark.parametrize("method", sorted(METHODS))
def test_measuring_changes_nothing_that_is_learned(method: str) -> None:
    plan = planned(method)
    before = {name: t.clone() for name, t in plan.method.state_dict().items()}
    state = torch.get_rng_state()
    estimate(plan)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in plan.method.parameters())
    after = plan.method.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_run_has_the_same_bits_after_a_measurement() -> None:
    plain, measured = planned(recipe={"epochs": 7}), planned(recipe={"epochs": 7})
    assert estimate(measured) is not None
    ours, other = fit(plain).method.state_dict(), fit(measured).method.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in ours.items())
