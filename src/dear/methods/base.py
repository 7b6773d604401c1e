"""Base class of methods: learned tensors, logits and a loss, in a frozen stage and a learned stage.

Beside it stands what methods are written with: the prompts of the classes, random numbers to start from, and
the types of a training step's input and output.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear._io.text import check_name, fill_template
from dear.clip.gpu.recorded import Runner, recorder_of, run_eagerly
from dear.clip.model import Clip, kept_cast, matrix_dtype
from dear.clip.tower import Edit
from dear.errors import InputError, RunError, UsageError
from dear.heads.roles import RoleMap
from dear.methods.calibration import Calibration, apply_scales, class_scales, distance_ratio
from dear.methods.options import Preset, configured


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is minimized, and its named parts (unweighted, for the log)."""

    total: Tensor  #: scalar
    parts: Mapping[str, Tensor]  #: name -> scalar, detached


class Batch(NamedTuple):
    """Normalized pixels [B, 3, S, S], labels [B] and, where the dataset has them, domain numbers [B]."""

    pixels: Tensor
    labels: Tensor
    domains: Tensor | None = None


class FeatureBatch(NamedTuple):
    """A batch whose frozen image features [B, E] are known already, in place of its pixels."""

    features: Tensor
    labels: Tensor
    domains: Tensor | None = None


Batches = Callable[[bool], Iterator[Batch | FeatureBatch]]  #: batches(augment) walks the training set once


def features_of(clip: Clip, batch: Batch | FeatureBatch) -> Tensor:
    """Frozen image features [B, E] of a batch: the known ones, or computed from its pixels."""
    return batch.features if isinstance(batch, FeatureBatch) else clip.encode_image(batch.pixels)


Frozen = tuple[Tensor, ...]  #: what `Method.frozen_stage` returns: tensors [B, ...]


TEMPLATE = "a photo of a {}."
_CLASSES_AT_ONCE = 256  # bounds the memory of the frozen passes over long class lists


def unit(x: Tensor) -> Tensor:
    """Features [..., E] at length 1, in float32 (float64 stays): cosines and logits need the precision."""
    return F.normalize(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, dim=-1)


def scores(clip: Clip, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's logits [B, C]: temperature times the cosines of features [B, E] and [C, E]."""
    return clip.logit_scale * unit(images) @ unit(texts).T


def distance(adapted: Tensor, frozen: Tensor) -> Tensor:
    """1 - cosine, the mean over rows of unit features [n, E].

    >>> float(distance(torch.eye(2), torch.eye(2).flip(0)))
    1.0
    """
    return (1 - (adapted * frozen).sum(-1)).mean()


class ClassPrompts:
    """One prompt per class, as token ids, with the frozen work on them done once.

    Args:
        clip: the backbone whose text tower reads the prompts.
        classes: names of the classes.
        template: the sentence around a name, with `{}` in its place.
        ids: token ids [C, T] to use instead of tokenizing the sentences.
    """

    def __init__(self, clip: Clip, classes: Sequence[str], template: str, ids: Tensor | None = None) -> None:
        if isinstance(classes, str) or not classes:
            raise UsageError(f"classes must be a list of at least one name; got {classes!r}")
        nameless = [c for c in classes if not isinstance(c, str) or not c.strip()]
        if nameless:
            raise UsageError(f"a class name must be text that is not empty; got {nameless[0]!r}")
        self.clip = clip
        self.classes = tuple(check_name(name) for name in classes)
        self.template = template
        self.texts = tuple(fill_template(template, name) for name in self.classes)
        self.given = ids
        full = clip.tokenize(self.texts) if ids is None else ids
        if full.ndim != 2 or full.shape[0] != len(self.classes):
            raise InputError(
                f"ids must be [{len(self.classes)}, T], one row per class; got {list(full.shape)}"
            )
        if full.numel() == 0 or not 0 <= int(full.min()) <= int(full.max()) < clip.config.text.vocab:
            raise InputError(f"ids must be token numbers from 0 to {clip.config.text.vocab - 1}")
        self.ids = clip.text.cut(full).to(clip.device)  # [C, T]
        self.eot = clip.text.eot(self.ids)  # [C]
        self._frozen: Tensor | None = None
        self._prefix: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def on(self, clip: Clip) -> ClassPrompts:
        """The same prompts read by a copy of the backbone; the frozen features stay those of the first."""
        other = copy.copy(self)
        other._frozen = self.frozen
        if clip is not self.clip:
            other.clip, other._prefix = clip, {}
        else:
            other._prefix = dict(self._prefix)
        return other

    @property
    def frozen(self) -> Tensor:
        """Unit features of the prompts under the frozen text tower, [C, E]."""
        if self._frozen is None:
            with torch.no_grad():
                self._frozen = unit(self.clip.encode_text(self.ids))
        return self._frozen

    def prefix(self, last: int) -> Tensor:
        """What layer `last` of the frozen text tower gives, [C, T, D] (0: the embeddings); kept."""
        if last not in self._prefix:
            with torch.no_grad():
                tower = self.clip.text
                parts = [tower.run(tower.embed(i), last=last) for i in self.ids.split(_CLASSES_AT_ONCE)]
                self._prefix[last] = torch.cat(parts)
        return self._prefix[last]

    def features(self, edit: Edit, first: int = 1) -> Tensor:
        """Features [C, E] (not unit) of the text tower under `edit`, which starts to act at layer `first`.

        Layers before `first` are the kept prefix; the last layer computes EOT's row alone.
        """
        end = self.eot + (edit.count if edit.at is not None else 0)
        tower = self.clip.text
        x = tower.run(self.prefix(first - 1), first=first, edit=edit, read=end[:, None])  # [C, 1, D]
        return tower.project(x[:, 0])


def normal(generator: torch.Generator, *shape: int, std: float = 0.02) -> Tensor:
    """Normal random numbers around 0; 0.02 is the deviation of CLIP's token embeddings."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * std


def uniform(generator: torch.Generator, *shape: int, inputs: int) -> Tensor:
    """Uniform within 1/sqrt(inputs): how PyTorch initializes the weight and bias of a linear layer.

    >>> float(uniform(torch.Generator().manual_seed(0), 1000, inputs=4).abs().max()) < 0.5
    True
    """
    bound = max(1, inputs) ** -0.5
    return torch.rand(*shape, generator=generator, dtype=torch.float64).mul(2).sub(1).mul(bound)


def linear(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Weight [..., out, in] and bias [..., out] of a linear layer, as PyTorch initializes them.

    >>> [list(t.shape) for t in linear(torch.Generator(), 3, 4)]
    [[3, 4], [3]]
    """
    return uniform(generator, *shape, inputs=shape[-1]), uniform(generator, *shape[:-1], inputs=shape[-1])


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """Options of a method that has none."""


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
    first: int | None = None  #: the first layer of the image tower that it changes; None: it changes none
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
        self.config = self.configure(options, config)
        clip = clip.focused(getattr(self.config, "focus", ()))  # see `dear.methods.focus`
        self._clip = (clip,)  # in a tuple: a Module attribute would be registered
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
        if name is None:
            return Preset("the method's own values")
        if name not in cls.presets:
            offer = f"it has {', '.join(cls.presets)}" if cls.presets else "it has none"
            raise UsageError(f"the method {cls.name!r} has no preset {name!r}; {offer}")
        return cls.presets[name]

    @classmethod
    def recommended(cls) -> str | None:
        """Name of the preset that is used unless another is named: the first one."""
        return next(iter(cls.presets), None)

    # -- what a subclass writes -------------------------------------------------------------------

    def build(self, generator: torch.Generator) -> None:
        """Make the learned tensors; random numbers come from `generator` (on the CPU)."""

    def frozen_stage(self, pixels: Tensor) -> Frozen:
        """What the loss needs of the frozen backbone for pixels [B, 3, S, S]: tensors [B, ...].

        It depends on no learned tensor and draws no random numbers. Here it is the input of layer `first`
        [B, N, D]; without one, the frozen image feature [B, E] with `reads_feature`, else the pixels.
        """
        if self.first is not None:
            return (self.clip.visual.prefix(pixels, self.first),)
        return (self.clip.encode_image(pixels),) if self.reads_feature else (pixels,)

    def inference_stage(self, pixels: Tensor) -> Frozen:
        """The part of `frozen_stage` that `logits_from_frozen` reads; here all of it."""
        return self.frozen_stage(pixels)

    def stage_key(self) -> Hashable:
        """Methods on one backbone with equal keys have the same `inference_stage`.

        Here: all with the same first changed layer, all that read the frozen image feature alone, and
        otherwise none but itself.
        """
        if self.first is not None:
            return "prefix", self.first
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
        """Image features [B, E], not of unit length; here those of the frozen backbone."""
        features = frozen[0] if self.reads_feature else self.clip.encode_image(frozen[0])
        return features[..., : self.clip.config.embed_dim]  # a focus stands behind them

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

    def settled_config(self) -> Any:
        """The options with what training chose by itself, for trainings on parts of the same images."""
        return self.config

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
            features = self.clip.focused(()).encode_image(pixels)
            frozen = scores(self.clip, features, self.prompts.frozen)
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

        On a GPU small batches that come again are replayed from a recording of the whole way to the scores.
        """
        mode = self.pick_mode(mode)
        pixels = pixels.to(self.clip.device)
        if not pixels.is_cuda or self._disabled:
            return self.all_logits(pixels)[mode]
        key = (type(self).__name__, mode, id(self.clip), id(self.prompts), self._stamp())
        (found,) = recorder_of(self.clip)(key, lambda given: (self.all_logits(given)[mode],), pixels)
        return found

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
        clip = clip.focused(self.clip.focus)
        other._clip = (clip,)
        other.prompts = self.prompts.on(clip)
        other._cache = {}
        return other

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, kept while no learned tensor changes; with gradients on it is computed every time."""
        if torch.is_grad_enabled():
            return compute()
        stamp = self._stamp()
        if key not in self._cache or self._cache[key][0] != stamp:
            self._cache[key] = (stamp, compute())
        return self._cache[key][1]

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a learned tensor does."""
        return tuple((t.data_ptr(), t._version) for t in (*self.parameters(), *self.buffers()))


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
