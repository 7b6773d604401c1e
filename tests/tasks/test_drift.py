"""Drift: nearness and the two-sample test against plain loops, and through the command on drawn images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dear.calibration.reference import MOST, NEIGHBORS, PER_CLASS, REFERENCE, Reference, draw_reference
from dear.cli import build_app
from dear.data.open import open_data
from dear.errors import DearError
from dear.tasks.adapt import adapt
from dear.tasks.drift import compare, find_far, two_sample


def gaussian(count: int, shift: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 24, generator=torch.Generator().manual_seed(seed)) + shift


def test_nearness_is_that_of_a_plain_loop() -> None:
    reference = Reference.of(gaussian(40), torch.arange(40) % 4)
    new = gaussian(7, seed=1)
    known = reference.features.float().numpy()
    unit = new.numpy() / np.linalg.norm(new.numpy(), axis=1, keepdims=True)
    for row, found in zip(unit, reference.nearness(new), strict=True):
        nearest = sorted((float(row @ other) for other in known), reverse=True)[:NEIGHBORS]
        assert found == pytest.approx(np.mean(nearest), abs=1e-3)
    for place, found in enumerate(reference.mutual_nearness):
        others = [float(known[place] @ other) for i, other in enumerate(known) if i != place]
        assert found == pytest.approx(np.mean(sorted(others, reverse=True)[:NEIGHBORS]), abs=1e-3)


def test_the_test_keeps_its_level_and_sees_a_shift() -> None:
    same = [two_sample(gaussian(30, seed=s), gaussian(25, seed=100 + s), permutations=99) for s in range(40)]
    assert np.mean(np.array(same) <= 0.1) < 0.25  # 10% are expected
    assert two_sample(gaussian(60), gaussian(60, shift=0.8, seed=1)) < 0.01


def test_the_number_of_far_images_keeps_its_level_with_few_training_images() -> None:
    rng = np.random.default_rng(0)
    p_values = [
        find_far(torch.from_numpy(rng.normal(size=40)), torch.from_numpy(rng.normal(size=200)))[1]
        for _ in range(1000)
    ]
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(p_values) <= level) <= level + 0.015  # a binomial test: 0.25 at level 0.01


def test_far_images_are_named() -> None:
    reference = Reference.of(gaussian(200, shift=1.0), torch.zeros(200, dtype=torch.long))
    new = torch.cat([gaussian(60, shift=1.0, seed=2), -gaussian(20, shift=1.0, seed=3)])
    names = [f"{index}.jpg" for index in range(80)]
    found = compare(reference, new, names, ["a"] * 60 + ["b"] * 20)
    assert found.drifted
    assert found.classes[0].name == "b"
    frame = found.to_frame()
    assert len(frame) == 80
    assert frame["far"].mean() == pytest.approx(found.far)
    assert found.verdict in found._repr_html_()
    assert {int(name.removesuffix(".jpg")) >= 60 for name in found.examples} == {True}
    assert not compare(reference, gaussian(80, shift=1.0, seed=5), names, ["a"] * 80).drifted


def test_a_reference_is_kept_and_a_damaged_one_refused(tmp_path) -> None:
    labels = torch.zeros(PER_CLASS + 9, dtype=torch.long)
    reference = Reference.of(gaussian(len(labels)), labels)
    assert len(reference.labels) == PER_CLASS
    assert len(draw_reference(torch.arange(2 * MOST) % MOST)) == MOST
    reference.save(tmp_path)
    again = Reference.load(tmp_path)
    assert again is not None
    assert torch.equal(again.features, reference.features)
    path = tmp_path / REFERENCE
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DearError):
        Reference.load(tmp_path)
    assert Reference.load(tmp_path / "elsewhere") is None


def test_other_images_drift_and_the_same_kind_does_not(tmp_path) -> None:
    run, known = tmp_path / "run", open_data("world:vehicles", "train")
    for place in range(0, len(known), 4):
        path = tmp_path / "known" / known.classes[int(known.labels[place])] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        known.image(place).save(path)
    adapt(tmp_path / "known", run, method="tip-adapter", shots=4, options={"views": 0}, calibrate=False)
    for name in ("vehicles", "scenes"):
        images = open_data(f"world:{name}", "train")
        (tmp_path / name).mkdir()
        for place in range(0, len(images), max(1, len(images) // 30)):
            images.image(place).save(tmp_path / name / f"{place}.png")
    found = {}
    for name in ("vehicles", "scenes"):
        result = CliRunner().invoke(build_app(), ["drift", str(run), str(tmp_path / name), "--json"])
        assert result.exit_code == 0, result.output
        found[name] = '"drifted": true' in result.output
    assert found == {"vehicles": False, "scenes": True}
