"""A method as a plain graph: one tensor in, tensors out, everything else a constant.

Tracing meets two things in a method that it cannot follow: numbers read off tensors (CLIP's temperature) and
tensors kept between calls (the class weights). Here both are taken once, before the trace, from a copy that
shares every weight with the original.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.calibration.calibration import apply_scales
from dear.calibration.calibrator import Calibrator
from dear.calibration.reference import NEIGHBORS
from dear.clip.model import Clip
from dear.clip.sharing import map_tensors, replace
from dear.clip.towers import TextTower, VisionTower
from dear.clip.variant import with_correction
from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.runs.model import Model


class _Traceable(Clip):
    """A CLIP whose temperature is a number, not a tensor."""

    number: float

    @property
    def logit_scale(self) -> float:
        """The temperature as it was when the copy was made."""
        return self.number


def traceable_clip(clip: Clip) -> Clip:
    """A float32 copy on the CPU for tracing, with written-out attention; weights are shared if possible."""

    def place(owner: nn.Module, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)

    plain = map_tensors(clip.plain, place)
    copy = replace(
        plain,
        _Traceable,
        number=clip.logit_scale,
        digests=clip.weight_digests(),
        visual=replace(plain.visual, VisionTower, fused=False),
        text=replace(plain.text, TextTower, fused=False),
    )
    return with_correction(copy, clip.correction)


def traceable_method(method: Method) -> Method:
    """A copy of `method` on a traceable backbone, with every cached tensor computed and fixed."""
    clip = traceable_clip(method.clip)
    copy = method.bind(clip) if clip.device == method.clip.device else method.copy_to(clip)
    copy.eval()
    with torch.no_grad():
        copy(blank(method.clip))  # computes the cached tensors: class weights, expanded masks
    copy.fix_cached()
    return copy


def blank(clip: Clip) -> Tensor:
    """Pixels to trace with, [2, 3, S, S]."""
    size = clip.config.vision.image_size
    return torch.zeros(2, 3, size, size)


class Scores(nn.Module):
    """Pixels [B, 3, S, S] to the scores [B, C] of every mode, in the order of `model.modes`.

    Where the run can answer "none of these", `known` and `known_MODE` [B] follow: scores that thresholds are
    compared with. `held_out` are the same scores of held-out images, from which thresholds are read.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        method = model.method
        self.method = traceable_method(method)
        self.visual = self.method.clip.visual  # registered here: a method does not register its backbone
        self.names: tuple[str, ...] = ("scores", *method.modes[1:])
        # Calibrated: a runtime's softmax of the scores says how sure the answer is.
        self.calibrator = model.calibrator
        self.scales = [self.calibrator.scales(mode) for mode in model.modes]  # [2 or 3, C] each, or None
        self.held_out = _held_out_scores(self.calibrator, model.modes)
        self.reference: Tensor | None = None  # [n, E], unit features of training images
        if self.held_out:
            self.names += ("known", *(f"known_{mode}" for mode in method.modes[1:]))
            if self.calibrator.needs_nearness and model.reference is not None:
                self.reference = model.reference.unit

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The scores of every mode, and what thresholds are compared with."""
        method = self.method
        if self.reference is None:
            answers, nearness = method(pixels), None
        else:
            stage = method.inference_stage(pixels, method.clip)
            assert stage.feature is not None
            answers = method.logits_from_frozen(stage)
            width, count = self.reference.shape[1], min(NEIGHBORS, len(self.reference))
            cosines = F.normalize(stage.feature[..., :width].float(), dim=-1) @ self.reference.T
            nearness = cosines.topk(count, dim=-1).values.mean(dim=-1)
        scaled = [
            answers[mode] if scales is None else apply_scales(answers[mode], scales)
            for mode, scales in zip(method.modes, self.scales, strict=True)
        ]
        if not self.held_out:
            return tuple(scaled)
        scores = [
            self.calibrator.score(z, nearness, mode) for mode, z in zip(method.modes, scaled, strict=True)
        ]
        return (*scaled, *scores)


def _held_out_scores(calibrator: Calibrator, modes: tuple[str, ...]) -> dict[str, list[float]]:
    """Sorted scores of held-out images by mode; empty where the run cannot answer "none of these"."""
    calibration = calibrator.calibration
    if calibration is None or calibrator.several or not any(calibrator.trained):
        return {}
    if any(mode not in calibration.modes or not calibration.modes[mode].logits for mode in modes):
        return {}
    return {mode: sorted(calibration.held_out(mode, calibrator.needs_nearness)) for mode in modes}


class Features(nn.Module):
    """Pixels [B, 3, S, S] to the adapted image feature [B, E] and, for DeAR, its attributes' [B, A, E]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        method = model.method
        self.method: DeAR | None = None
        self.attributes: tuple[str, ...] = ()
        if isinstance(method, DeAR):
            copied = traceable_method(method)
            assert isinstance(copied, DeAR)
            self.method, self.visual = copied, copied.clip.visual
            self.attributes = tuple(method.attributes)
        elif method.mergeable:
            self.visual = traceable_clip(method.merge()).visual
        elif method.trainable_parameters == 0:
            self.visual = traceable_clip(method.clip).visual
        else:
            raise UsageError(
                f"the method {method.name!r} has no image encoder of its own; export the whole model",
                hint="encoder-only",
            )
        self.names = ("features", "attributes") if self.attributes else ("features",)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The features, not of unit length."""
        return (self.visual(pixels),) if self.method is None else self.method.image_features(pixels)
