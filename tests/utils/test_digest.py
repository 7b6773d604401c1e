"""Digests depend on what they should, and on nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from dear.utils.digest import of_file, of_json, of_parts, of_tensors


def test_text_files_and_values(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    assert of_file(tmp_path / "a") == of_parts(b"x" * 3_000_000) == hashlib.sha256(b"x" * 3_000_000).digest()
    assert of_parts("\ud800") != of_parts("?")  # names of files may hold such characters
    assert of_json({"a": 1, "b": [2]}) == of_json({"b": (2,), "a": 1}) != of_json({"a": 1, "b": [3]})
    with pytest.raises(OSError, match="missing"):
        of_file(tmp_path / "missing")


@pytest.mark.parametrize("as_float32", [False, True])
def test_tensors(as_float32: bool) -> None:
    state = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}
    known = of_tensors(state, as_float32)
    assert of_tensors(dict(reversed(state.items())), as_float32) == known
    assert of_tensors(state | {"w": state["w"].T.contiguous().T}, as_float32) == known
    for other in (
        {"w": state["w"].view(3, 2)},
        {"w": state["w"] + 1},
        {"n": torch.tensor(4)},
        {"x": state["n"]},
    ):
        assert of_tensors(state | other, as_float32) != known
    assert (of_tensors(state | {"w": state["w"].half()}, as_float32) == known) == as_float32
