"""`Method`, the contract of everything that adapts a frozen CLIP: learned tensors, logits and a loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.errors import RunError, UsageError
from dear.heads.roles import RoleMap
from dear.methods.frozen import (
    Batch,
    Batches,
    Cut,
    FeatureBatch,
    Frozen,
    Loss,
    features_of,
    frozen_feature,
    frozen_input,
)
from dear.methods.options import Preset, configured
from dear.methods.prompts import ClassPrompts, ContextPrompts
from dear.methods.tensors import distance, linear, normal, scores, uniform, unit
from dear.utils.text import unknown_name

__all__ = [
    "TEMPLATE",
    "Batch",
    "Batches",
    "ClassPrompts",
    "ContextPrompts",
    "Cut",
    "FeatureBatch",
    "Frozen",
    "Loss",
    "Method",
    "distance",
    "features_of",
    "frozen_feature",
    "in_precision",
    "linear",
    "normal",
    "scores",
    "uniform",
    "unit",
]


TEMPLATE = "a photo of a {}."


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """Options of a method that has none."""


M = TypeVar("M", bound="Method")
Cache = dict[str, tuple[tuple[tuple[int, int], ...], Tensor]]


class _Bound(NamedTuple):
    """What a method keeps of its texts on another copy of its backbone, for `in_precision`."""

    clip: Clip
    of: ClassPrompts  #: the method's prompts at that time
    prompts: ClassPrompts
    cache: Cache


class Method(nn.Module):
    """A way to adapt a frozen CLIP to some classes.

    A subclass says where the frozen part of the image tower ends (`cut`), makes its learned tensors in
    `build`, and writes what differs from zero-shot CLIP: `texts` (text features [C, E]), `images_from_frozen`
    (image features [B, E] from what the tower gives at the cut), or `logits_from_frozen` for both; the loss
    is cross-entropy unless it writes `loss_from_frozen`. What the tower gives at the cut depends on nothing
    that is learned, so training and serving compute it ahead of time, keep it and share it.

    Rarely written: `prepare` (before the first step), `after_epoch`, `finish`, `merge` (fold what was learned
    into a plain CLIP), `facts`, `state_shapes`, `backward`.

    Parameters (made with `learn`) and buffers are what is learned and saved, and the only state that training
    may change. The backbone is held but not registered, so neither `parameters()` nor a saved file contains
    it, and a method never exchanges it: `bound` returns another object on another copy of the backbone.
    Whether it can name new classes, runs a tower in a step or can be merged is found out, not declared.

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
    about: ClassVar[str] = ""  #: one line for people who choose a method
    cut: Cut = "feature"  #: where the frozen part of the image tower ends; `build` may set it
    class_token_at: int | None = None  #: `frozen[1]` is the class token [B, 1, D] at the input of this layer
    reads_frozen: bool = False  #: the loss also reads the frozen unit image feature, `frozen[-1]` [B, E]
    dynamic: ClassVar[bool] = False  #: steps differ in what they compute, so that a GPU cannot replay one
    modes: ClassVar[tuple[str, ...]] = ("default",)  #: ways to predict, the usual one first
    uses_roles: ClassVar[bool] = False
    recipe: ClassVar[Mapping[str, Any]] = {}  #: where its training differs from the usual recipe
    presets: ClassVar[Mapping[str, Preset]] = {}  #: named settings, the recommended one first
    Config: ClassVar[type] = NoConfig  #: frozen dataclass of its options
    #: whether `Config` has the option `focus`: (layer, head) pairs whose contribution is read as well
    can_focus: ClassVar[bool] = False
    #: options that replace the defaults where a method that reads features is trained without random views
    own_view_options: ClassVar[Mapping[str, Any]] = {}
    mergeable: ClassVar[bool] = False  #: found out: whether it writes `merge`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.loss is not Method.loss:
            raise TypeError(f"{cls.__name__}: write loss_from_frozen; loss runs the frozen stage before it")
        cls.mergeable = cls.merge is not Method.merge

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
        self.config = self.configure(options, config)
        clip = clip.focused(self.config.focus if self.can_focus else ())  # see `dear.methods.focus`
        self._clip = (clip,)  # in a tuple: a Module attribute would be registered
        if roles is not None and not self.uses_roles:
            raise UsageError(f"the method {self.name!r} uses no role map; leave roles out")
        self.roles = roles
        self.allow_other_roles = allow_other_roles
        self.prompts = ClassPrompts(clip, classes, template, ids)
        self.trained_classes = self.prompts.classes if trained is None else tuple(trained)
        self.notice: str | None = None  #: a sentence the user should see
        self._cache: Cache = {}
        self._last_bound: _Bound | None = None
        self.build(torch.Generator().manual_seed(seed))
        self._start_shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}

    @classmethod
    def configure(cls, options: Mapping[str, Any], config: Any = None) -> Any:
        """The `Config` of `options` by name, as people write them; what they leave out is as in `config`."""
        return configured(cls.name, cls.Config, options, config)

    @classmethod
    def preset(cls, name: str | None = None) -> Preset:
        """A named setting of the method; None: the recommended one, which is empty where there is none."""
        name = cls.recommended() if name is None else name
        if name is None:
            return Preset("the method's own values")
        if name not in cls.presets:
            if not cls.presets:
                raise UsageError(f"the method {cls.name!r} has no presets, got {name!r}")
            raise UsageError(unknown_name(f"preset of {cls.name}", name, cls.presets))
        return cls.presets[name]

    @classmethod
    def recommended(cls) -> str | None:
        """Name of the preset that is used unless another is named: the first one."""
        return next(iter(cls.presets), None)

    # -- what a subclass writes -------------------------------------------------------------------

    def build(self, generator: torch.Generator) -> None:
        """Make the learned tensors; random numbers come from `generator` (on the CPU)."""

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        """Image features [B, E], not of unit length; here those of the frozen backbone."""
        return self.clip.parts(frozen_feature(self.clip, self.cut, frozen[0])).feature

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

    def settled_config(self) -> Any:
        """The options with what training chose by itself, for trainings on parts of the same images."""
        return self.config

    def facts(self) -> dict[str, Any]:
        """Plain values worth keeping beside a run's metrics."""
        return {}

    def merge(self) -> Clip:
        """A plain CLIP that gives the same image features, where there is one."""
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
        """How many parameters are learned by gradient."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def learned_parameters(self) -> int:
        """How many numbers were learned, by gradient or, in methods without gradient, in closed form.

        A setting that was chosen, such as the probe's C, is none of them.
        """
        if self.trainable_parameters:
            return self.trainable_parameters
        state = self.state_dict().values()
        return sum(t.numel() for t in state if t.is_floating_point() and t.dim())

    def learn(self, start: Tensor, lr_scale: float = 1.0) -> nn.Parameter:
        """A learned tensor that starts at `start`: on the backbone's device, at least in float32.

        `lr_scale` is its learning rate as a multiple of the recipe's.
        """
        wide = torch.float64 if self.clip.dtype == torch.float64 else torch.float32
        parameter = nn.Parameter(start.detach().to(self.clip.device, wide, copy=True))
        parameter.lr_scale = lr_scale  # type: ignore[attr-defined]
        return parameter

    @property
    def open_classes(self) -> bool:
        """Whether it can name classes it was not trained on: nothing learned is sized by their number."""
        if "_open_classes" not in self.__dict__:
            given, several = self.prompts.given, len(self.classes) > 1
            names = self.classes[:1] if several else (*self.classes, "something else")
            ids = None if given is None else given[[0]] if several else given[[0, 0]]
            twin = self.untrained(classes=names, ids=ids, trained=self.trained_classes)
            self._open_classes = twin._start_shapes == self._start_shapes
        return self._open_classes

    @property
    def quick(self) -> bool:
        """Whether a training step runs neither tower once the frozen part is known."""
        contexts = any(isinstance(part, ContextPrompts) for part in vars(self).values())
        return self.cut in ("feature", "pooled") and type(self).texts is Method.texts and not contexts

    def inference_stage(self, pixels: Tensor) -> Frozen:
        """What `logits_from_frozen` reads of pixels [B, 3, S, S]: what the tower gives at the cut."""
        return self.stages(pixels)[0]

    def frozen_stage(self, pixels: Tensor) -> Frozen:
        """What `loss_from_frozen` reads: the same and, with `reads_frozen`, unit image features [B, E]."""
        stage, last, cut = self.stages(pixels)
        return (*stage, unit(frozen_feature(self.clip, cut, last))) if self.reads_frozen else stage

    def stages(self, pixels: Tensor) -> tuple[Frozen, Tensor, Cut]:
        """The inference stage, and how far the tower was run for it: what it gave, and where."""
        found = frozen_input(self.clip, self.cut, pixels)
        if self.class_token_at is None or not isinstance(self.cut, int):
            return (found,), found, self.cut
        with torch.no_grad():
            later = self.clip.visual.run(found, self.cut, self.class_token_at - 1)
        return (found, later[:, :1]), later, self.class_token_at

    def by_training(self, trained: Tensor, others: Tensor) -> Tensor:
        """Logits [B, C]: columns of trained classes from the first tensor, all others from the second."""
        columns = [name in self.trained_classes for name in self.classes]
        if all(columns):
            return trained
        return torch.where(torch.tensor(columns, device=trained.device), trained, others)

    def pick_mode(self, mode: str | None) -> str:
        """The mode that is meant: the usual one for None."""
        if mode is None:
            return self.modes[0]
        if mode not in self.modes:
            raise UsageError(f"the method {self.name!r} has no mode {mode!r}; it has {', '.join(self.modes)}")
        return mode

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] in float32, of normalized pixels [B, 3, S, S]; with gradients."""
        return self.logits_from_frozen(self.inference_stage(pixels))

    def loss(self, pixels: Tensor, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """The loss of pixels [B, 3, S, S], labels [B] and, where there are any, domain numbers [B]."""
        return self.loss_from_frozen(self.frozen_stage(pixels), labels, domains)

    @torch.no_grad()
    def logits(self, pixels: Tensor, mode: str | None = None) -> Tensor:
        """Scores [B, C] of normalized pixels [B, 3, S, S] in one mode, without gradient."""
        return self.all_logits(pixels)[self.pick_mode(mode)]

    @torch.no_grad()
    def all_logits(self, pixels: Tensor) -> dict[str, Tensor]:
        """Scores [B, C] in every mode; what the modes share is computed once."""
        answers: dict[str, Tensor] = self(pixels.to(self.clip.device))
        return answers

    def adapter_state(self) -> dict[str, Tensor]:
        """What was learned, by name; no tensor of the backbone is in it."""
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}

    def load_adapter_state(self, state: Mapping[str, Tensor], source: str = "the adapter") -> None:
        """Take over learned tensors; those that do not fit are named, and nothing is changed."""
        own = self.state_dict(keep_vars=True)
        shapes = {name: tensor.shape for name, tensor in own.items()}
        shapes |= {name: torch.Size(shape) for name, shape in self.state_shapes(state).items()}
        complaints = [f"{name} is missing" for name in own if name not in state]
        complaints += [f"{name} is not part of the method {self.name!r}" for name in state if name not in own]
        both = [(name, tensor, state[name]) for name, tensor in own.items() if name in state]
        complaints += [
            f"{name} is {list(new.shape)} where {list(shapes[name])} is expected"
            for name, _, new in both
            if new.shape != shapes[name]
        ]
        complaints += [
            f"{name} is {str(new.dtype).removeprefix('torch.')}, another kind of number than expected"
            for name, tensor, new in both
            if new.is_floating_point() != tensor.is_floating_point()
        ]
        if complaints:
            raise RunError(f"{source} does not fit: {'; '.join(complaints)}")
        for name, tensor in own.items():
            if tensor.shape != shapes[name]:  # the tensor object stays: an optimizer may hold it
                tensor.data = tensor.data.new_zeros(shapes[name])
        self.load_state_dict(dict(state))

    def untrained(self: M, clip: Clip | None = None, classes: Sequence[str] | None = None, **other: Any) -> M:
        """A new method of the same kind, options, classes and roles, but for the arguments that are given."""
        same = {
            "template": self.template,
            "roles": self.roles,
            "allow_other_roles": self.allow_other_roles,
            "ids": self.prompts.given,
            "config": self.config,
        }
        classes = self.classes if classes is None else classes
        return type(self)(self.clip if clip is None else clip, classes, **{**same, **other})

    def with_classes(
        self, classes: Sequence[str], template: str | None = None, ids: Tensor | None = None
    ) -> Method:
        """The same adapter on other classes: a method of its own with a copy of the learned tensors."""
        if not self.open_classes and tuple(classes) != self.classes:
            new = [name for name in classes if name not in self.classes]
            listed = ", ".join(map(repr, new[:5])) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            raise UsageError(
                f"the method {self.name!r} learns its {len(self.classes)} classes and cannot name others "
                f"afterwards; {'not trained: ' + listed if new else 'name all of them, in their order'}"
            )
        template = self.template if template is None else template
        return self._again(classes=classes, template=template, ids=ids)

    def copied_to(self, clip: Clip) -> Method:
        """The same adapter and classes on a copy of the backbone on any device, with tensors of its own."""
        return self._again(clip=clip)

    def _again(self, **other: Any) -> Method:
        again = self.untrained(trained=self.trained_classes, **other)
        again.load_adapter_state(self.adapter_state())
        return again

    def bound(self: M, clip: Clip) -> M:
        """The same method on another copy of its backbone (in lower precision, say).

        The new object shares everything learned with this one, whichever of the two is trained, and has
        prompts and cached tensors of its own. This one stays as it is.
        """
        if clip.config != self.clip.config or clip.device != self.clip.device:
            raise UsageError(
                f"the method {self.name!r} can be bound to a copy of its own backbone on the same device "
                f"({self.clip.device}); got {clip.name} on {clip.device}"
            )
        other = copy.copy(self)  # shallow: PyTorch's tables of parameters and buffers are the same objects
        clip = clip.focused(self.clip.focus)
        other._clip = (clip,)
        other.prompts = self.prompts.on(clip)
        other._cache, other._last_bound = {}, None
        return other

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, cached while no learned tensor changes; with gradients on it is always computed."""
        if torch.is_grad_enabled():
            return compute()
        stamp = self._stamp()
        if key not in self._cache or self._cache[key][0] != stamp:
            self._cache[key] = (stamp, compute())
        return self._cache[key][1]

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a learned tensor does."""
        return tuple((t.data_ptr(), t._version) for t in (*self.parameters(), *self.buffers()))


def in_precision(method: M, precision: str) -> M:
    """`method` bound to its backbone in a precision; `method` itself stays as it is.

    "auto" leaves a backbone that was loaded in another precision than float32 as it is. The copy of a
    backbone is made once and cached as long as the backbone; what a method keeps of its texts on it is found
    again, so that answers for one image after another encode texts once.
    """
    clip = method.clip
    if precision != "auto" or clip.dtype == torch.float32:
        clip = clip.cast(matrix_dtype(precision, clip.device))
    bound, known = method.bound(clip), method._last_bound
    if known is not None and known.clip is clip and known.of is method.prompts:
        bound.prompts, bound._cache = known.prompts, known.cache
    else:
        method._last_bound = _Bound(clip, method.prompts, bound.prompts, bound._cache)
    return bound
