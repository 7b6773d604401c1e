"""Options from a command line or a file become what the configuration wants, or are refused in a sentence."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_clip

from dear.errors import UsageError
from dear.methods import METHODS, build_method
from dear.methods.options import fit_options
from dear.runs.recipe import Recipe

NAMES = ("red", "green")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("purify", {"bandwidths": "1,2,4"}, (1.0, 2.0, 4.0)),
        ("purify", {"bandwidths": [1, 2.5]}, (1, 2.5)),
        ("purify", {"bandwidths": 2}, (2.0,)),
        ("purify", {"bandwidths": "none"}, None),
        ("purify", {"bandwidths": None}, None),
        ("purify", {"gates": "False"}, False),
        ("purify", {"gates": "on"}, True),
        ("purify", {"lora": "none"}, "none"),
        ("purify", {"weight": 3}, 3),
        ("clip-lora", {"on": "q, v"}, ("q", "v")),
        ("clip-lora", {"on": ["k"]}, ("k",)),
        ("dear", {"attributes": "Color,Shape"}, ("Color", "Shape")),
        ("mmrl", {"first_layer": "None"}, None),
        ("mmrl", {"first_layer": 2}, 2),
        ("coop", {"words": ""}, ""),
    ],
)
def test_what_is_written_is_what_is_meant(name: str, options: dict, expected: object) -> None:
    fitted = fit_options(METHODS[name].Config, options)
    (value,) = fitted.values()
    assert value == expected
    assert type(value) is type(expected)
    config = METHODS[name].Config(**fitted)
    assert getattr(config, next(iter(options))) == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("purify", {"bandwidths": "wide"}),
        ("purify", {"gates": "perhaps"}),
        ("purify", {"gates": 1}),
        ("purify", {"rank": 2.5}),
        ("purify", {"rank": True}),
        ("purify", {"weight": "much"}),
        ("purify", {"weight": float("nan")}),
        ("purify", {"lora": 3}),
        ("dear", {"beta": "high"}),
        ("dear", {"direction_ridge": 1e-300}),
        ("proker", {"ridge": 0.0}),
        ("coop", {"context": None}),
    ],
)
def test_values_of_another_type_are_rejected(name: str, options: dict) -> None:
    with pytest.raises(UsageError) as refusal:
        build_method(name, tiny_clip(dtype=torch.float32), NAMES, **options)
    for option, value in options.items():
        assert option in str(refusal.value)
        assert str(value) in str(refusal.value)


def test_the_recipe_is_read_in_the_same_way() -> None:
    assert Recipe.of(METHODS["coop"], scale="0.3,1", lr=1).scale == (0.3, 1.0)
    with pytest.raises(UsageError, match=r"epochs.*many"):
        Recipe.of(METHODS["coop"], epochs="many")
    with pytest.raises(UsageError, match=r"scale.*0\.5"):
        Recipe.of(METHODS["coop"], scale=0.5)
