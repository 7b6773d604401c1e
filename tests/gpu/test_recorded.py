"""Training on a GPU: a recorded step is the eager step, step by step, and gives runs that load on a CPU."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from recorded import batch, gradients, model
from tiny import LEARNING, SMALL, Colors, mixed_roles, tiny_clip
from torch import Tensor

from dear.clip.gpu import Recorder
from dear.methods import METHODS, DeAR, Method, build_method
from dear.methods.frozen import Frozen, Loss
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.recording import StepRecording
from dear.train.run import train

pytestmark = pytest.mark.gpu


def strong() -> Method:
    """As `adapt` trains it."""
    clip = tiny_clip(dtype=torch.float32).to("cuda")
    return build_method("dear", clip, ("red", "green", "blue"), roles=mixed_roles())


@pytest.mark.parametrize("size", ["tiny", "ViT-B-32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_step_is_the_eager_step_at_every_step(size: str, dtype: torch.dtype) -> None:
    """Both start every step from the same tensors and the same optimizer state, so nothing drifts apart."""
    recorded, eager = model(size, dtype), model(size, dtype)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True)
        for m in (recorded, eager)
    ]

    def step(inputs: object) -> object:
        loss = recorded.loss(*inputs)
        loss.total.backward()
        return loss

    learned = list(recorded.parameters())
    step(batch(recorded, 0))
    optimizers[0].step()  # allocates its state
    replay = StepRecording(step, batch(recorded, 0), learned, optimizers[0])
    # The same kernels on the same numbers: only the choice of matrix-product algorithms may differ.
    near = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    for number in range(1, 6):
        with torch.no_grad():
            for ours, theirs in zip(eager.parameters(), learned, strict=True):
                ours.copy_(theirs)
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        before = [p.detach().clone() for p in learned]
        inputs = batch(recorded, number)
        replay(inputs)
        grads = gradients(eager, *inputs)
        optimizers[1].step()
        for p, grad, other in zip(learned, grads, eager.parameters(), strict=True):
            scale = float(grad.abs().max())
            torch.testing.assert_close(p.grad / scale, grad / scale, **near)
            torch.testing.assert_close(p, other, rtol=near["rtol"], atol=10 * near["atol"])
        assert any(not torch.equal(p, old) for p, old in zip(learned, before, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_recorded_training_learns_the_task(precision: str) -> None:
    method = model()
    lines = train(method, Colors(), Recipe(epochs=20, batch=5, lr=1e-2, precision=precision)).lines
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert Model(method).evaluate(Colors()).accuracy["fused"] > 0.5


def test_trained_on_a_gpu_loads_on_the_cpu(tmp_path: Path) -> None:
    method = model()
    train(method, Colors(), Recipe(epochs=5, batch=4, deterministic=True), tmp_path / "run")
    loaded = load_run(tmp_path / "run", tiny_clip(dtype=torch.float32))
    pixels = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(loaded.logits(pixels), method.logits(pixels).cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in LEARNING if not METHODS[name].dynamic])
def test_a_replayed_step_trains_as_an_ordinary_one(name: str) -> None:
    task, states = Colors(domains=2), []
    for replay in (True, False):
        clip = tiny_clip(dtype=torch.float32).to("cuda")
        options = SMALL.get(name, {})
        method = build_method(name, clip, task.classes, roles=mixed_roles(), **options)
        train(
            method, task, Recipe.of(method, epochs=20, batch=4, lr=1e-3, replay=replay, precision="float32")
        )
        states.append(method.adapter_state())
    for key, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][key], rtol=1e-2, atol=1e-3, msg=key)


class Waiting(DeAR):
    """DeAR with a loss that waits for the GPU, which no recording can."""

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """As in DeAR."""
        loss = super().loss_from_frozen(frozen, labels, domains)
        assert loss.total.item() > 0
        return loss


def test_a_step_that_cannot_be_recorded_trains_unrecorded_and_spoils_nothing_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = []
    for kind, replay in ((DeAR, True), (Waiting, True), (Waiting, False), (DeAR, True)):
        method = kind(tiny_clip(dtype=torch.float32).to("cuda"), Colors().classes, roles=mixed_roles())
        torch.cuda.manual_seed(0)
        before = torch.cuda.get_rng_state()
        train(method, Colors(), Recipe(epochs=20, batch=4, lr=1e-3, replay=replay, precision="float32"))
        torch.cuda.set_rng_state(before)  # refused while a recording goes on
        assert torch.isfinite(torch.randn(3, device="cuda")).all()
        states.append(method.adapter_state())
    assert caplog.text.count("cannot be recorded") == 1
    for state in states[1:]:
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, states[0][key], rtol=1e-2, atol=1e-3, msg=key)


def test_a_function_that_cannot_be_recorded_answers_unrecorded() -> None:
    def waiting(x: Tensor) -> tuple[Tensor]:
        return (x * x.max().item(),)

    recorder, x = Recorder(), torch.rand(3, 4, device="cuda")
    with torch.no_grad(), recorder.record_immediately(), pytest.warns(UserWarning, match="unrecorded"):
        first = recorder("waiting", waiting, x)
    assert torch.equal(first[0], waiting(x)[0])
    assert torch.isfinite(torch.randn(3, device="cuda")).all()
    with torch.no_grad(), recorder.record_immediately(), warnings.catch_warnings():
        warnings.simplefilter("error")
        doubled = recorder("double", lambda x: (2 * x,), x)
    assert torch.equal(doubled[0], 2 * x)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_evaluating_within_a_recorded_training_changes_no_bit_of_it(precision: str) -> None:
    """Memory that the recording reads must stay alive while other bindings come and go."""
    states, answers = [], []
    for watch in (False, True):
        method = strong()

        def progress(*_: object, method: Method = method, watch: bool = watch) -> None:
            if watch:
                Model(method).evaluate(Colors())
                torch.cuda.empty_cache()
                junk = [torch.full((n,), float("nan"), device="cuda") for n in (64, 4096, 1 << 16, 1 << 20)]
                del junk

        recipe = Recipe(epochs=30, batch=4, lr=1e-2, precision=precision, deterministic=True)
        train(method, Colors(), recipe, progress=progress)
        states.append(method.adapter_state())
        answers.append(method.logits(batch(method, 0)[0]))
    assert all(torch.equal(tensor, states[0][key]) for key, tensor in states[1].items())
    assert torch.equal(*answers)


def test_logits_in_a_callback_of_a_recorded_training_are_the_present_ones() -> None:
    method, pixels = strong(), batch(strong(), 0)[0]
    gaps = []

    def progress(*_: object) -> None:
        kept = method.logits(pixels)
        method._cache.clear()
        gaps.append(float((kept - method.logits(pixels)).abs().max()))

    train(method, Colors(), Recipe(epochs=30, batch=4, lr=1e-2), progress=progress)
    assert len(gaps) == 90
    assert max(gaps) <= 1e-5
