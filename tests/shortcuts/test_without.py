"""Names of what to remove: concepts and image properties."""

from __future__ import annotations

import pytest

from dear.errors import UsageError
from dear.shortcuts.without import Without


@pytest.mark.parametrize(("name", "near"), [("sharpnes", "sharpness"), ("locaton", "location")])
def test_a_misspelled_property_or_concept_is_named(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=near) as error:
        Without.of(name)
    assert name in str(error.value)


def test_an_unknown_name_lists_concepts_and_properties() -> None:
    with pytest.raises(UsageError) as error:
        Without.of("xyzzy")
    assert "location" in str(error.value)
    assert "vignette" in str(error.value)
