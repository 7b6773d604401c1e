"""Base class of methods: learned tensors, logits and a loss, in a frozen stage and a learned stage."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.gpu.recorded import Runner, recorder_of, run_eagerly
from dear.clip.model import Clip, kept_cast, matrix_dtype
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.methods.batch import Batch, Batches, Frozen, Loss
from dear.methods.calibration import Calibration, apply_scales, class_scales, distance_ratio
from dear.methods.learned import load_state
from dear.methods.options import configured
from dear.methods.presets import Preset, find_preset
from dear.methods.prompts import TEMPLATE, ClassPrompts, scores, unit


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """Options of a method that has none."""


__all__ = ["Batch", "Batches", "Frozen", "Loss", "M", "Method", "NoConfig", "in_precision"]

M = TypeVar("M", bound="Method")


class Method(nn.Module):
    """A way to adapt a frozen CLIP to some classes.

    A method runs in two stages. `frozen_stage` computes from pixels what depends on the frozen backbone
    alone; `logits_from_frozen` and `loss_from_frozen` continue from there with what is learned. `forward` and
    `loss` are the two stages in sequence, and training may run the first one ahead of time and keep its
    result. A subclass sets the class attributes, makes its parameters in `build`, and writes
    `images_from_frozen` (image features), `texts` (text features), or `logits_from_frozen` (both); the loss
    is cross-entropy unless it writes `loss_from_frozen`.

    Parameters and buffers are what is learned and saved, and the only state that training may change. The
    backbone is held but not registered, so neither `parameters()` nor a saved file contains it, and a method
    never exchanges it: `bound` returns another object on another copy of the backbone.

    Args:
        clip: the frozen backbone; learned tensors are made on its device.
        classes: class names.
        template: prompt with `{}` for the class name.
        roles: role map, for methods with `uses_roles`.
        allow_other_roles: take a role map that was made on other weights of a fitting shape.
        ids: token ids [C, T] of the prompts, instead of tokenizing them.
        seed: of the learned tensors' random start.
        trained: classes the adapter was trained on, where they are not `classes`.
        config: the method's options as its `Config`; or give them as keywords.
        options: fields of `Config` by name.
    """

    name: ClassVar[str]  #: as in `build_method` and in saved runs
    title: ClassVar[str]  #: as in tables
    modes: ClassVar[tuple[str, ...]] = ("default",)  #: ways to predict, the usual one first
    uses_roles: ClassVar[bool] = False
    mergeable: ClassVar[bool] = False
    open_classes: ClassVar[bool] = True  #: can name classes it was not trained on
    reads_feature: ClassVar[bool] = False  #: its frozen stage is the frozen image feature [B, E] alone
    quick: ClassVar[bool] = False  #: a training step runs neither tower once the frozen stage is known
    #: every step launches the same kernels and never waits for the GPU
    cuda_graph_safe: ClassVar[bool] = False
    recipe: ClassVar[Mapping[str, Any]] = {}  #: where its training differs from the usual recipe
    presets: ClassVar[Mapping[str, Preset]] = {}  #: named settings, the recommended one first
    Config: ClassVar[type] = NoConfig  #: frozen dataclass; `earlier_values` says how fields are added later

    def __init__(
        self,
        clip: Clip,
        classes: Sequence[str],
        *,
        template: str = TEMPLATE,
        roles: RoleMap | None = None,
        allow_other_roles: bool = False,
        ids: Tensor | None = None,
        seed: int = 1,
        trained: Sequence[str] | None = None,
        config: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._clip = (clip,)  # in a tuple: a Module attribute would be registered
        self.config = self.configure(options, config)
        if roles is not None and not self.uses_roles:
            raise UsageError(f"the method {self.name!r} uses no role map; leave roles out")
        self.roles = roles
        self.allow_other_roles = allow_other_roles
        self.prompts = ClassPrompts(clip, classes, template, ids)
        self.trained_classes = self.prompts.classes if trained is None else tuple(trained)
        self.calibration: Calibration | None = None  #: for `calibrated`; `dear.train.calibrate` finds it
        self.notice: str | None = None  #: a sentence the user should see
        self._disabled = False
        self._cache: dict[str, tuple[tuple[tuple[int, int], ...], Tensor]] = {}
        generator = torch.Generator().manual_seed(seed)
        self.build(generator)

    @classmethod
    def configure(cls, options: Mapping[str, Any], config: Any = None) -> Any:
        """The `Config` of `options` by name, as people write them; what they leave out is as in `config`.

        Raises:
            UsageError: the method has no such option, or its value is of another kind.
        """
        return configured(cls.name, cls.Config, options, config)

    @classmethod
    def preset(cls, name: str | None = None) -> Preset:
        """A named setting of the method; None: the recommended one, which is empty where there is none.

        Raises:
            UsageError: the method has no such preset.
        """
        name = cls.recommended() if name is None else name
        return Preset("the method's own values") if name is None else find_preset(cls.name, cls.presets, name)

    @classmethod
    def recommended(cls) -> str | None:
        """Name of the preset that is used unless another is named: the first one."""
        return next(iter(cls.presets), None)

    # -- what a subclass writes -------------------------------------------------------------------

    def build(self, generator: torch.Generator) -> None:
        """Make the learned tensors; random numbers come from `generator` (on the CPU)."""

    def frozen_stage(self, pixels: Tensor) -> Frozen:
        """What the loss needs of the frozen backbone for pixels [B, 3, S, S]: tensors [B, ...].

        It depends on no learned tensor and draws no random numbers. Here the pixels themselves.
        """
        return (pixels,)

    def inference_stage(self, pixels: Tensor) -> Frozen:
        """The part of `frozen_stage` that `logits_from_frozen` reads; here all of it."""
        return self.frozen_stage(pixels)

    def stage_key(self) -> Hashable:
        """Methods on one backbone with equal keys have the same `inference_stage`.

        Here: all that read the frozen image feature alone, and otherwise none but itself.
        """
        return "feature" if self.reads_feature else id(self)

    def stack_key(self) -> Hashable | None:
        """Adapters with equal keys are computed in one pass by `stacked_logits`; None: one after another."""
        return None

    def stacked_logits(
        self, methods: Sequence[Method], frozen: Frozen, mode: str, run: Runner = run_eagerly
    ) -> list[Tensor]:
        """Logits [C_i] of each image [B, ...] under its own adapter of `methods` [B], in one pass.

        `run` runs functions of tensors [B, ...], eagerly or recorded.
        """
        raise NotImplementedError(f"{self.name} gives no stack_key")

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        """Image features [B, E], not of unit length; here those of the frozen backbone on pixels."""
        return self.clip.encode_image(frozen[0])

    def texts(self) -> Tensor:
        """Text features [C, E] of the classes; here the frozen ones of the prompts."""
        return self.prompts.frozen

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] in float32; here CLIP's of `images_from_frozen` and `texts`."""
        images = self.images_from_frozen(frozen)
        return {self.modes[0]: scores(self.clip, images, self.cached("texts", self.texts))}

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """The loss from the frozen stage, labels [B] and, where there are any, domain numbers [B]."""
        ce = F.cross_entropy(self.logits_from_frozen(frozen)[self.modes[0]], labels)
        return Loss(ce, {"ce": ce.detach()})

    def rates(self) -> Mapping[str, float]:
        """Learning rates that differ from the recipe's, as multiples of it, by name of the parameter."""
        return {}

    def prepare(self, batches: Batches) -> None:
        """Called once before the first step; `batches(augment)` walks the training set (for cache models)."""

    def backward(self, loss: Loss, scale: Callable[[Tensor], Tensor]) -> None:
        """Put gradients on the parameters; `scale` multiplies a loss for mixed precision."""
        scale(loss.total).backward()

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Called after each epoch, counted from 1."""

    def finish(self) -> None:
        """Called once after the last step."""

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """Shapes of those tensors of `state` whose size the training set decided (for cache models)."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Plain values worth keeping beside a run's metrics."""
        return {}

    def merge(self) -> Clip:
        """A plain CLIP that gives the same image features, for methods with `mergeable`."""
        raise UsageError(f"the method {self.name!r} cannot be folded into a plain CLIP")

    # -- what every method has --------------------------------------------------------------------

    @property
    def clip(self) -> Clip:
        """The frozen backbone."""
        return self._clip[0]

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the logits."""
        return self.prompts.classes

    @property
    def template(self) -> str:
        """The sentence around a class name."""
        return self.prompts.template

    @property
    def trainable_parameters(self) -> int:
        """How many parameters are learned."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def learn(self, start: Tensor) -> nn.Parameter:
        """A learned tensor that starts at `start`: on the backbone's device, at least in float32."""
        wide = torch.float64 if self.clip.dtype == torch.float64 else torch.float32
        return nn.Parameter(start.detach().to(self.clip.device, wide, copy=True))

    def by_training(self, trained: Tensor, others: Tensor) -> Tensor:
        """Logits [B, C]: columns of trained classes from the first tensor, all others from the second."""
        if self.all_trained:
            return trained
        columns = torch.tensor(self._trained_columns(), device=trained.device)
        return torch.where(columns, trained, others)

    def _trained_columns(self) -> list[bool]:
        known = set(self.trained_classes)
        return [name in known for name in self.classes]

    @property
    def all_trained(self) -> bool:
        """Whether every class is one that the learned tensors were made for."""
        return all(self._trained_columns())

    def pick_mode(self, mode: str | None) -> str:
        """The mode that is meant: the usual one for None.

        Raises:
            UsageError: the method has no such mode.
        """
        if mode is None:
            return self.modes[0]
        if mode not in self.modes:
            raise UsageError(f"the method {self.name!r} has no mode {mode!r}; it has {', '.join(self.modes)}")
        return mode

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] in float32, of normalized pixels [B, 3, S, S]; with gradients."""
        if self._disabled:
            frozen = scores(self.clip, self.clip.encode_image(pixels), self.prompts.frozen)
            return dict.fromkeys(self.modes, frozen)
        return self.logits_from_frozen(self.inference_stage(pixels))

    def loss(self, pixels: Tensor, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """The loss of pixels [B, 3, S, S], labels [B] and, where there are any, domain numbers [B]."""
        if self._disabled:
            ce = F.cross_entropy(self(pixels)[self.modes[0]], labels)
            return Loss(ce, {"ce": ce.detach()})
        return self.loss_from_frozen(self.frozen_stage(pixels), labels, domains)

    @torch.no_grad()
    def logits(self, pixels: Tensor, mode: str | None = None) -> Tensor:
        """Scores [B, C] of normalized pixels [B, 3, S, S] in one mode, without gradient.

        On a GPU small batches that come again are replayed from a recording.
        """
        mode = self.pick_mode(mode)
        if self.clip.device.type == "cuda" and len(pixels) and not self._disabled:
            from dear.methods.together import answer_together

            run = recorder_of(self.clip)
            if len(pixels) <= run.buckets[-1]:
                return torch.stack(answer_together([self] * len(pixels), pixels, mode, run))
        return self.all_logits(pixels)[mode]

    @torch.no_grad()
    def all_logits(self, pixels: Tensor) -> dict[str, Tensor]:
        """Scores [B, C] in every mode; what the modes share is computed once."""
        answers: dict[str, Tensor] = self(pixels.to(self.clip.device))
        return answers

    def calibrated(self, logits: Tensor, mode: str | None = None) -> Tensor:
        """Logits [B, C] of a mode on the scale where their softmax says how sure the answer is.

        Without a calibration, or for a mode that it does not hold, they stay on CLIP's own scale.
        """
        scales = self.calibration_scales(mode)
        return logits if scales is None else apply_scales(logits, scales.to(logits))

    def calibration_scales(self, mode: str | None = None) -> Tensor | None:
        """What `calibrated` does with each class's logits (`class_scales`), [3, C]; None: nothing."""
        mode = self.pick_mode(mode)
        own = None if self.calibration is None else self.calibration.modes.get(mode)
        if own is None or self._disabled:
            return None
        trained = self._trained_columns()
        gamma = torch.ones(len(trained))
        if not all(trained):
            with torch.no_grad():
                gamma = self.cached("distance ratio", self.distance_ratio)
        return class_scales(own, trained, gamma)

    def distance_ratio(self) -> Tensor:
        """How training changed each class's distance from the trained ones in text space, [C]; 1: not."""
        base = self if self.classes == self.trained_classes else self.with_classes(self.trained_classes)
        tuned, frozen = (unit(f).float() for f in (self.texts(), self.prompts.frozen))
        base_tuned, base_frozen = (unit(f).float() for f in (base.texts(), base.prompts.frozen))
        return distance_ratio(tuned, frozen, base_tuned, base_frozen).float().cpu()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within `with method.disabled():` logits and loss are the frozen CLIP's: nothing learned is used."""
        before, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = before

    def adapter_state(self) -> dict[str, Tensor]:
        """What was learned, by name; no tensor of the backbone is in it."""
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}

    def load_adapter_state(self, state: Mapping[str, Tensor], source: str = "the adapter") -> None:
        """Take over learned tensors.

        Raises:
            RunError: naming the tensors that are missing, surplus or of another shape; nothing is changed.
        """
        load_state(self, state, self.state_shapes(state), self.name, source)

    def with_classes(
        self, classes: Sequence[str], template: str | None = None, ids: Tensor | None = None
    ) -> Method:
        """The same adapter on other classes: a method of its own with a copy of the learned tensors.

        Raises:
            UsageError: what the method learned is tied to its classes.
        """
        if not self.open_classes and tuple(classes) != self.classes:
            raise UsageError(f"the method {self.name!r} learns its classes: it cannot name others afterwards")
        return self._again(self.clip, classes, self.template if template is None else template, ids)

    def copied_to(self, clip: Clip) -> Method:
        """The same adapter and classes on a copy of the backbone on any device, with tensors of its own."""
        return self._again(clip, self.classes, self.template, self.prompts.given)

    def _again(self, clip: Clip, classes: Sequence[str], template: str, ids: Tensor | None) -> Method:
        other = type(self)(
            clip,
            classes,
            template=template,
            roles=self.roles,
            allow_other_roles=self.allow_other_roles,
            ids=ids,
            trained=self.trained_classes,
            config=self.config,
        )
        other.load_adapter_state(self.adapter_state())
        other.calibration = self.calibration
        return other

    def bound(self: M, clip: Clip) -> M:
        """The same method on another copy of its backbone (in lower precision, say).

        The new object shares everything learned with this one, whichever of the two is trained, and has
        prompts and kept tensors of its own. This one stays as it is.

        Raises:
            UsageError: the backbone has another shape, or is on another device than the learned tensors.
        """
        if clip.config != self.clip.config or clip.device != self.clip.device:
            raise UsageError(
                f"the method {self.name!r} can be bound to a copy of its own backbone on the same device "
                f"({self.clip.device}); got {clip.name} on {clip.device}"
            )
        other = copy.copy(self)  # shallow: PyTorch's tables of parameters and buffers are the same objects
        other._clip = (clip,)
        other.prompts = self.prompts.on(clip)
        other._cache = {}
        return other

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, kept while no learned tensor changes; with gradients on it is computed every time."""
        if torch.is_grad_enabled():
            return compute()
        stamp = tuple((t.data_ptr(), t._version) for t in (*self.parameters(), *self.buffers()))
        if key not in self._cache or self._cache[key][0] != stamp:
            self._cache[key] = (stamp, compute())
        return self._cache[key][1]


_texts: WeakKeyDictionary[Method, tuple[Clip, Any, Any, Any]] = WeakKeyDictionary()


def in_precision(method: M, precision: str) -> M:
    """`method` bound to its backbone in a precision; `method` itself stays as it is.

    "auto" leaves a backbone that was loaded in another precision than float32 as it is. The copy of a
    backbone is made once and kept as long as the backbone; what a method keeps of its texts on it is found
    again, so that answers for one image after another encode texts once.
    """
    clip = method.clip
    if precision != "auto" or clip.dtype == torch.float32:
        clip = kept_cast(clip, matrix_dtype(precision, clip.device))
    bound = method.bound(clip)
    kept = _texts.get(method)
    if kept is not None and kept[0] is clip and kept[1] is method.prompts:
        bound.prompts, bound._cache = kept[2], kept[3]
    else:
        _texts[method] = (clip, method.prompts, bound.prompts, bound._cache)
    return bound
