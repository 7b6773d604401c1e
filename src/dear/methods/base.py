"""`Method`, the contract of everything that adapts a frozen CLIP: learned tensors, logits and a loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.config import Head
from dear.clip.model import Clip, ImagesOrPixels, require_clip
from dear.clip.sharing import tensor_stamp
from dear.clip.variant import matrix_dtype
from dear.errors import RunError, UsageError
from dear.heads.roles import RoleMap
from dear.methods.class_rows import ClassRows
from dear.methods.frozen import (
    Batches,
    Cut,
    Frozen,
    Loss,
    encode_with_focus,
    frozen_feature,
    frozen_input,
)
from dear.methods.options import Preset, build_config
from dear.methods.prompts import ClassPrompts
from dear.methods.tensors import scores, unit
from dear.methods.texts import ClassTexts
from dear.utils.text import unknown_name

TEMPLATE = "a photo of a {}."


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """Options of a method that has none."""


M = TypeVar("M", bound="Method")
Cache = dict[str, tuple[tuple[tuple[int, int], ...], Tensor]]


class _BoundTexts(NamedTuple):
    """Prompts and cached texts of a method on another copy of its backbone, which `in_precision` reuses."""

    clip: Clip
    source: ClassPrompts  #: the method's prompts from which `prompts` were copied
    prompts: ClassPrompts
    cache: Cache


class Method(nn.Module):
    """A way to adapt a frozen CLIP to some classes.

    A subclass sets where the frozen part of the image tower ends (`cut`), creates its learned tensors in
    `build`, and overrides what differs from zero-shot CLIP: `texts` (text features [C, E]),
    `images_from_frozen` (image features [B, E] from the tower's output at the cut), or `logits_from_frozen`
    for both; the loss is cross-entropy unless it overrides `loss_from_frozen`. The tower's output at the cut
    does not depend on learned tensors, so training and serving compute it in advance, cache and share it.

    Rarely overridden: `prepare` (before the first step), `after_epoch`, `finish`, `merge` (fold learned
    tensors into a plain CLIP), `learned_values`, `state_shapes`, `backward`.

    Parameters (created with `learn`) and buffers are what is learned and saved, and the only state that
    training may change. The backbone is not registered as a submodule, so neither `parameters()` nor a saved
    file contains it, and a method never replaces it: `bind` returns another object on another copy of the
    backbone. Whether a method can name new classes or can be merged is derived, not declared.

    Args:
        clip: the frozen backbone; learned tensors are created on its device.
        classes: class names.
        template: prompt with `{}` for the class name.
        roles: role map, for methods with `uses_roles`.
        allow_other_roles: accept a role map of other weights with the same shape.
        ids: token ids [C, T] of the prompts, instead of tokenizing them.
        texts: several sentences per class, by class; see `dear.methods.texts`.
        several: images may show several of the classes; each class then has its own sigmoid.
        seed: random seed for the initial values of the learned tensors.
        trained: classes that the adapter was trained on, if they differ from `classes`.
        config: the method's options as its `Config`, instead of keywords.
        options: fields of `Config` by name.
    """

    name: ClassVar[str]  #: as in `build_method` and in saved runs
    title: ClassVar[str]  #: as in tables
    about: ClassVar[str] = ""  #: one line for people who choose a method
    cut: Cut = "feature"  #: where the frozen part of the image tower ends; `build` may set it
    class_token_at: int | None = None  #: `frozen.class_token` is read at the input of this layer
    reads_frozen: bool = False  #: the loss reads the frozen unit image feature, `frozen.feature` [B, E]
    quick: ClassVar[bool] = False  #: a training step runs neither tower once the frozen stage is known
    holds_out: ClassVar[bool] = False  #: `prepare` chooses values on held-out images, copies with each other
    dynamic: ClassVar[bool] = False  #: steps differ in what they compute, so that a GPU cannot replay one
    modes: ClassVar[tuple[str, ...]] = ("default",)  #: names of its kinds of logits, the default first
    uses_roles: ClassVar[bool] = False
    recipe: ClassVar[Mapping[str, Any]] = {}  #: values that differ from the default training recipe
    presets: ClassVar[Mapping[str, Preset]] = {}  #: named settings, the recommended one first
    Config: ClassVar[type] = NoConfig  #: frozen dataclass of its options
    #: options of earlier versions; a saved run loads only if it has these values, which are now fixed
    former_options: ClassVar[Mapping[str, Any]] = {}
    #: whether `Config` has the option `focus`: (layer, head) pairs whose terms are read as `frozen.focus`
    can_focus: ClassVar[bool] = False
    #: defaults of options where training images are not augmented, as for methods that read features
    options_without_augmentation: ClassVar[Mapping[str, Any]] = {}
    several_labels: ClassVar[bool] = False  #: whether it can learn several labels per image
    mergeable: ClassVar[bool] = False  #: derived: whether it overrides `merge`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.loss is not Method.loss:
            raise TypeError(f"{cls.__name__}: override loss_from_frozen instead of loss")
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
        texts: ClassTexts | None = None,
        several: bool = False,
        seed: int = 1,
        trained: Sequence[str] | None = None,
        config: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_clip(clip)
        self.config = self.configure(options, config)
        self._clip = (clip,)  # a tuple, because nn.Module would register a module
        #: heads whose terms of the image feature the method reads, sorted; see `dear.methods.focus`
        self.focus: tuple[Head, ...] = tuple(sorted(set(self.config.focus))) if self.can_focus else ()
        if self.focus:
            clip.config.vision.check_heads(self.focus)
            clip.visual.require_class_token("a focus on heads")
        if roles is not None and not self.uses_roles:
            raise UsageError(
                f"the method {self.name!r} does not use a role map, got roles; remove that argument"
            )
        if several and not self.several_labels:
            raise UsageError(
                f"the method {self.name!r} needs one label per image, but the data has several (labels); use "
                "dear, linear-probe, proker, tip-adapter, lp-plus-plus, or zeroshot"
            )
        self.several = several
        self.roles = roles
        self.allow_other_roles = allow_other_roles
        self.prompts = ClassPrompts(clip, classes, template, ids, texts)
        self.trained_classes = self.prompts.classes if trained is None else tuple(trained)
        self.notice: str | None = None  #: a warning for the user
        self._cache: Cache = {}
        self._fixed: dict[str, Tensor] | None = None
        self._last_bound: _BoundTexts | None = None
        self.build(torch.Generator().manual_seed(seed))
        #: shapes of the learned tensors before training
        self.start_shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}

    @classmethod
    def configure(cls, options: Mapping[str, Any], config: Any = None) -> Any:
        """A `Config` with these options, converted from text if needed; the others are those of `config`."""
        return build_config(cls.name, cls.Config, options, config)

    @classmethod
    def preset(cls, name: str | None = None) -> Preset:
        """A preset by name; None returns the recommended one, or an empty one if there is none."""
        name = cls.recommended() if name is None else name
        if name is None:
            return Preset("the method's default values")
        if name not in cls.presets:
            if not cls.presets:
                raise UsageError(
                    f"the method {cls.name!r} has no presets, got {name!r}; leave the preset out"
                )
            raise UsageError(unknown_name(f"preset of {cls.name}", name, cls.presets))
        return cls.presets[name]

    @classmethod
    def recommended(cls) -> str | None:
        """Name of the default preset, the first one; None if the method has no presets."""
        return next(iter(cls.presets), None)

    # -- what a subclass overrides -------------------------------------------------------------------

    def build(self, generator: torch.Generator) -> None:
        """Create the learned tensors; random numbers come from `generator` (on the CPU)."""

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        """Image features [B, E], unnormalized; by default those of the frozen backbone."""
        return frozen_feature(self.clip, self.cut, frozen.x)

    def texts(self) -> Tensor:
        """Text features [C, E] of the classes; by default the frozen features of the prompts."""
        return self.prompts.frozen

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] in float32; by default CLIP's, of `images_from_frozen` and `texts`."""
        images = self.images_from_frozen(frozen)
        return {self.modes[0]: scores(self.clip, images, self.cached("texts", self.texts))}

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """The loss for a frozen stage, labels [B] and, if the dataset has domains, their numbers [B]."""
        ce = F.cross_entropy(self.logits_from_frozen(frozen)[self.modes[0]], labels)
        return Loss(ce, {"ce": ce.detach()})

    def prepare(self, batches: Batches) -> None:
        """Called once before the first step; `batches(augment)` iterates over the training images."""

    def backward(self, loss: Loss, scale: Callable[[Tensor], Tensor]) -> None:
        """Compute the gradients of the parameters; `scale` scales a loss for mixed precision."""
        scale(loss.total).backward()

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Called after each epoch, counted from 1."""

    def finish(self) -> None:
        """Called once after the last step."""

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors of `state` whose size depends on the training set (for cache models)."""
        return {}

    def settled_config(self) -> Any:
        """`config` with the values chosen in training, so that cross-validation folds do not choose again."""
        return self.config

    def learned_values(self) -> dict[str, Any]:
        """Plain values to store with a run's metrics."""
        return {}

    def merge(self) -> Clip:
        """A plain CLIP with the learned tensors folded into its weights, if the method allows it."""
        raise UsageError(
            f"the method {self.name!r} cannot be folded into a plain CLIP; export the run to ONNX instead"
        )

    # -- shared by all methods --------------------------------------------------------------------

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
        """Prompt with `{}` for the class name."""
        return self.prompts.template

    @property
    def trainable_parameters(self) -> int:
        """Number of parameters learned by gradient descent."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def learned_parameters(self) -> int:
        """Number of learned values: trainable parameters, or the tensors of a closed-form solution.

        Scalars chosen by cross-validation, such as the probe's C, do not count.
        """
        if self.trainable_parameters:
            return self.trainable_parameters
        state = self.state_dict().values()
        return sum(t.numel() for t in state if t.is_floating_point() and t.dim())

    def learn(self, start: Tensor, lr_scale: float = 1.0) -> nn.Parameter:
        """A parameter initialized to `start`, on the backbone's device and at least in float32.

        `lr_scale` is its learning rate as a multiple of the recipe's.
        """
        dtype = torch.float64 if self.clip.dtype == torch.float64 else torch.float32
        parameter = nn.Parameter(start.detach().to(self.clip.device, dtype, copy=True))
        parameter.lr_scale = lr_scale  # type: ignore[attr-defined]
        return parameter

    @cached_property
    def open_classes(self) -> bool:
        """Whether it can predict new classes: no learned tensor depends on the number of classes."""
        # compare the shapes with those of the same method with another number of classes
        ids, fewer = self.prompts.token_ids, len(self.classes) > 1
        names = self.classes[:1] if fewer else (*self.classes, "something else")
        ids = None if ids is None else ids[[0]] if fewer else ids[[0, 0]]
        twin = self.untrained_copy(classes=names, ids=ids, trained=self.trained_classes)
        return twin.start_shapes == self.start_shapes

    def inference_stage(self, pixels: Tensor, feature_of: Clip | None = None) -> Frozen:
        """The input of `logits_from_frozen` for pixels [B, 3, S, S].

        `feature_of` is a variant of the backbone whose image feature [B, E] is computed as well; it shares
        the layers that were run.
        """
        visual, cut = self.clip.visual, self.cut
        if cut == "feature":
            stage = encode_with_focus(self.clip, pixels, self.focus)
            return stage if feature_of is None else stage._replace(feature=stage.x)
        last = x = frozen_input(self.clip, cut, pixels)
        stage = Frozen(x)
        with torch.no_grad():
            if self.class_token_at is not None and isinstance(cut, int):
                # without a focus or a feature, the last of these layers computes the class token alone
                everything = bool(self.focus) or feature_of is not None
                read = None if everything else torch.zeros(1, dtype=torch.long, device=x.device)
                last, cut = visual.run(x, cut, self.class_token_at - 1, read=read), self.class_token_at
                stage = stage._replace(class_token=last[:, :1])
            if self.focus:
                if isinstance(cut, int) and cut <= self.focus[0][0]:  # reuse the layers run so far
                    start, first = last, cut
                else:
                    start, first = visual.embed(pixels), 1
                _, (terms,) = visual.features_and_terms(start, first, (self.focus,))
                stage = stage._replace(focus=terms)
        return stage if feature_of is None else stage._replace(feature=frozen_feature(feature_of, cut, last))

    def frozen_stage(self, pixels: Tensor) -> Frozen:
        """The input of `loss_from_frozen`: with `reads_frozen`, it includes unit image features [B, E]."""
        stage = self.inference_stage(pixels, self.clip if self.reads_frozen else None)
        return stage if stage.feature is None else stage._replace(feature=unit(stage.feature))

    def select_logits(self, trained: Tensor, new: Tensor) -> Tensor:
        """Logits [B, C]: columns of trained classes from `trained`, those of new classes from `new`."""
        columns = [name in self.trained_classes for name in self.classes]
        if all(columns):
            return trained
        return torch.where(torch.tensor(columns, device=trained.device), trained, new)

    def pick_mode(self, mode: str | None) -> str:
        """`mode`, checked; None returns the default mode."""
        if mode is None:
            return self.modes[0]
        if mode not in self.modes:
            raise UsageError(f"mode of {self.name!r} must be one of {', '.join(self.modes)}, got {mode!r}")
        return mode

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] in float32, for normalized pixels [B, 3, S, S]; differentiable."""
        return self.logits_from_frozen(self.inference_stage(pixels))

    def loss(self, images: ImagesOrPixels, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """The loss for images, or normalized pixels [B, 3, S, S], and their labels [B].

        Args:
            images: as in `logits`.
            labels: numbers of the classes.
            domains: numbers of the domains [B], if the dataset has domains.
        """
        return self.loss_from_frozen(self.frozen_stage(self.clip.pixels(images)), labels, domains)

    @torch.no_grad()
    def logits(self, images: ImagesOrPixels, mode: str | None = None) -> Tensor:
        """Logits [B, C] in one mode, without gradients, of normalized pixels [B, 3, S, S] or of images."""
        return self.all_logits(self.clip.pixels(images))[self.pick_mode(mode)]

    @torch.no_grad()
    def all_logits(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits [B, C] of every mode, without gradients; what the modes share is computed once."""
        logits: dict[str, Tensor] = self(pixels.to(self.clip.device))
        return logits

    def adapter_state(self) -> dict[str, Tensor]:
        """Copies of the learned tensors by name, without the backbone's weights."""
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}

    def load_adapter_state(self, state: Mapping[str, Tensor], source: str = "the adapter") -> None:
        """Load learned tensors.

        Raises:
            RunError: a tensor is missing, unknown, or has the wrong shape or type; nothing is changed.
        """
        current = self.state_dict(keep_vars=True)
        shapes = {name: tensor.shape for name, tensor in current.items()}
        shapes |= {name: torch.Size(shape) for name, shape in self.state_shapes(state).items()}
        problems = [f"{name} is missing" for name in current if name not in state]
        problems += [
            f"{name} is not part of the method {self.name!r}" for name in state if name not in current
        ]
        pairs = [(name, tensor, state[name]) for name, tensor in current.items() if name in state]
        problems += [
            f"{name} must be {list(shapes[name])}, got {list(new.shape)}"
            for name, _, new in pairs
            if new.shape != shapes[name]
        ]
        problems += [
            f"{name} must be {str(tensor.dtype).removeprefix('torch.')}, got "
            f"{str(new.dtype).removeprefix('torch.')}"
            for name, tensor, new in pairs
            if new.is_floating_point() != tensor.is_floating_point()
        ]
        if problems:
            raise RunError(f"{source} does not fit: {'; '.join(problems)}")
        for name, tensor in current.items():
            if tensor.shape != shapes[name]:  # in place: an optimizer may refer to the tensor
                tensor.data = tensor.data.new_zeros(shapes[name])
        self.load_state_dict(dict(state))

    def untrained_copy(
        self: M, clip: Clip | None = None, classes: Sequence[str] | None = None, **other: Any
    ) -> M:
        """A new, untrained method with the settings of this one, except for the arguments."""
        settings = {
            "template": self.template,
            "roles": self.roles,
            "allow_other_roles": self.allow_other_roles,
            "ids": self.prompts.token_ids,
            "texts": self.prompts.texts,
            "several": self.several,
            "config": self.config,
        }
        classes = self.classes if classes is None else classes
        return type(self)(self.clip if clip is None else clip, classes, **{**settings, **other})

    def with_classes(
        self,
        classes: Sequence[str],
        template: str | None = None,
        ids: Tensor | None = None,
        texts: ClassTexts | None = None,
    ) -> Method:
        """A new method with copies of the learned tensors and other classes.

        `texts` are sentences per class, or features of classes; None keeps those of this method.
        """
        if not self.open_classes and tuple(classes) != self.classes:
            new = [name for name in classes if name not in self.classes]
            listed = ", ".join(map(repr, new[:5])) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            raise UsageError(
                f"{self.name!r} answers with all {len(self.classes)} classes of its training in their order, "
                f"got {listed or f'a list of {len(classes)} of them'}; leave out the list, use a method that "
                "reads names, such as dear, or train again"
            )
        template = self.template if template is None else template
        texts = self.prompts.texts if texts is None else texts
        return self._rebuilt(classes=classes, template=template, ids=ids, texts=texts)

    def share_learned(self, source: Method) -> None:
        """Use the learned tensors of a method of the same kind and options instead of copies of them."""
        self.load_state_dict(source.state_dict(), assign=True)

    def copy_to(self, clip: Clip) -> Method:
        """A new method with copies of the learned tensors and another backbone, on any device."""
        return self._rebuilt(clip=clip)

    def _rebuilt(self, **changes: Any) -> Method:
        method = self.untrained_copy(trained=self.trained_classes, **changes)
        method.load_adapter_state(self.adapter_state())
        return method

    def bind(self: M, clip: Clip) -> M:
        """The same method on another copy of its backbone, for example in lower precision.

        Both objects share the learned tensors, so training one trains the other; prompts and cached
        tensors are separate. This object is unchanged.
        """
        if clip.config != self.clip.config or clip.device != self.clip.device:
            raise UsageError(
                f"the method {self.name!r} must be bound to a copy of {self.clip.name} on "
                f"{self.clip.device}, got {clip.name} on {clip.device}"
            )
        other = copy.copy(self)  # shallow: both share the tables of parameters and buffers
        other._clip = (clip,)
        other.prompts = self.prompts.bind(clip)
        other._cache, other._fixed, other._last_bound = {}, None, None
        return other

    def in_precision(self: M, precision: str) -> M:
        """`bind` to a copy of the backbone in another precision.

        "auto" keeps a backbone that was not loaded in float32. The copy of the backbone is cached as long as
        the backbone exists, and encoded texts are reused, so repeated calls encode them once.
        """
        clip = self.clip
        if precision != "auto" or clip.dtype == torch.float32:
            clip = clip.cast(matrix_dtype(precision, clip.device))
        bound, last = self.bind(clip), self._last_bound
        if last is not None and last.clip is clip and last.source is self.prompts:
            bound.prompts, bound._cache = last.prompts, last.cache
        else:
            self._last_bound = _BoundTexts(clip, self.prompts, bound.prompts, bound._cache)
        return bound

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, cached until a learned tensor changes; never cached while gradients are enabled."""
        if self._fixed is not None:
            return self._fixed[key]
        if torch.is_grad_enabled():
            return compute()
        stamp = self.stamp()
        if key not in self._cache or self._cache[key][0] != stamp:
            self._cache[key] = (stamp, compute())
        return self._cache[key][1]

    def fix_cached(self) -> None:
        """Use the current cached tensors from now on, so that a traced graph contains them as constants."""
        self._fixed = {key: value.detach().clone() for key, (_, value) in self._cache.items()}

    def encode_classes(self) -> ClassRows:
        """Encode the texts of the classes, so that the next prediction encodes none."""
        side = self.clip.config.vision.image_size
        self.all_logits(torch.zeros(1, 3, side, side, device=self.clip.device))
        return self.class_rows()

    def class_rows(self) -> ClassRows:
        """The tensors with a row per class that are cached, for `set_class_rows`."""
        count = len(self.classes)
        cached = {key: rows for key, (_, rows) in self._cache.items() if len(rows) == count}
        return ClassRows(self.classes, cached, self.prompts.cached_frozen)

    def set_class_rows(self, rows: ClassRows) -> None:
        """Cache rows that were computed elsewhere, so that the next prediction encodes no text.

        Raises:
            RuntimeError: the rows belong to other classes, or have another order.
        """
        if rows.classes != self.classes:
            raise RuntimeError(
                f"rows must be those of the {len(self.classes)} classes of the method, in their order, got "
                f"{len(rows.classes)} rows of other classes or in another order"
            )
        stamp = self.stamp()
        if rows.frozen is not None:
            self.prompts.set_frozen(rows.frozen)
        self._cache.update({key: (stamp, value) for key, value in rows.cached.items()})

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """A value that changes whenever a learned tensor changes."""
        return tensor_stamp((*self.parameters(), *self.buffers()))
