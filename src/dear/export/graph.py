"""A method as a plain graph: one tensor in, tensors out, everything else a constant.

Tracing meets two things in a method that it cannot follow: numbers read off tensors (CLIP's temperature) and
tensors kept between calls (the class weights). Here both are taken once, before the trace, from a copy that
shares every weight with the original.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dear.calibration.scales import apply_scales
from dear.clip.model import Clip
from dear.clip.sharing import map_tensors, replace
from dear.clip.towers import TextTower, VisionTower
from dear.clip.variant import as_variant
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
    twin = replace(
        plain,
        _Traceable,
        number=clip.logit_scale,
        digests=clip.weight_digests(),
        visual=replace(plain.visual, VisionTower, fused=False),
        text=replace(plain.text, TextTower, fused=False),
    )
    return as_variant(twin, clip.variant)


def traceable_method(method: Method) -> Method:
    """A copy of `method` on a traceable backbone, with every cached tensor computed and fixed."""
    clip = traceable_clip(method.clip)
    twin = method.bound(clip) if clip.device == method.clip.device else method.copied_to(clip)
    twin.eval()
    with torch.no_grad():
        twin(blank(method.clip))  # fills what is kept: class weights, expanded masks
    kept = {key: value.detach().clone() for key, (_, value) in twin._cache.items()}
    twin.__dict__["cached"] = lambda key, compute: kept[key]
    return twin


def blank(clip: Clip, count: int = 2) -> Tensor:
    """Pixels to trace with, [count, 3, S, S]."""
    size = clip.config.vision.image_size
    return torch.zeros(count, 3, size, size)


class Scores(nn.Module):
    """Pixels [B, 3, S, S] to the scores [B, C] of every mode, in the order of `model.modes`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        method = model.method
        self.method = traceable_method(method)
        self.visual = self.method.clip.visual  # registered here: a method does not register its backbone
        self.names = ("scores", *method.modes[1:])
        # Calibrated: a runtime's softmax of the scores says how sure the answer is.
        self.scales = [model.scale.factors(mode) for mode in model.modes]  # [2, C] each, or None

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The scores of every mode."""
        answers: dict[str, Tensor] = self.method(pixels)
        scores = [answers[mode] for mode in self.method.modes]
        pairs = zip(scores, self.scales, strict=True)
        return tuple(z if s is None else apply_scales(z, s) for z, s in pairs)


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
