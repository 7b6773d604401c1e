"""Every number of every method: 0, -1, NaN and infinity are rejected by name and value, or they work."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest
import torch
from tiny import SMALL, Colors, mixed_roles, tiny_clip

from dear.errors import UsageError
from dear.methods import METHODS, Method, build_method
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.utils.validation import hints_of

VALUES = (0, -1, math.nan, math.inf)
TASK = Colors(domains=2)


def numbers(config: type) -> list[str]:
    """Names of the options that take numbers."""

    def numeric(hint: typing.Any) -> bool:
        return hint in (int, float) or any(numeric(part) for part in typing.get_args(hint))

    return [name for name, hint in hints_of(config).items() if numeric(hint)]


CELLS = [(name, option) for name, kind in METHODS.items() for option in numbers(kind.Config)]


@pytest.mark.parametrize(("name", "option"), CELLS)
def test_a_number_is_rejected_or_works(name: str, option: str) -> None:
    clip = tiny_clip(dtype=torch.float32)
    for value in VALUES:
        options = {**SMALL.get(name, {}), option: value}
        method: Method | None = None
        refusal = ""
        try:
            method = build_method(name, clip, TASK.classes, roles=mixed_roles(), **options)
        except UsageError as error:
            refusal = str(error)
        if method is None:
            assert option in refusal
            assert str(value) in refusal
            continue
        train(method, TASK, Recipe.of(METHODS[name], epochs=2, batch=5, views=0))
        assert all(tensor.isfinite().all() for tensor in method.adapter_state().values()), value
        with torch.no_grad():
            answers = method.all_logits(torch.zeros(2, 3, 24, 24))
        assert all(logits.isfinite().all() for logits in answers.values()), value


def test_values_of_a_config_are_checked_without_build() -> None:
    for name, option in CELLS:
        kind = METHODS[name]
        with pytest.raises(UsageError, match=option):
            dataclasses.replace(kind.Config(), **{option: math.nan})
