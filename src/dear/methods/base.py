"""What every method is: learned tensors, logits, a loss, and a few moments at which training asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.model import Clip
from dear.errors import RunError, UsageError
from dear.heads.roles import RoleMap
from dear.methods.options import fit_options
from dear.methods.prompts import TEMPLATE, ClassPrompts, scores


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is minimized, and its named parts (unweighted, for the log)."""

    total: Tensor  #: scalar
    parts: Mapping[str, Tensor]  #: name -> scalar, detached


class Batch(NamedTuple):
    """Normalized pixels [B, 3, S, S], labels [B] and, where the set has them, domain numbers [B]."""

    pixels: Tensor
    labels: Tensor
    domains: Tensor | None = None


Batches = Callable[[bool], Iterator[Batch]]  #: batches(augment) walks the training set once


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """Options of a method that has none."""


class Method(nn.Module):
    """A way to adapt a frozen CLIP to some classes.

    A subclass sets the class attributes, makes its parameters in `build`, and says what becomes of the
    images (`images`), of the classes (`texts`), or of both (`forward`); `loss` is cross-entropy unless it
    says otherwise. Parameters and buffers of the module are what is learned and
    saved; the backbone is held but not registered, so neither `parameters()` nor a saved file knows it.

    Args:
        clip: the frozen backbone; learned tensors are made on its device.
        classes: class names.
        template: prompt with `{}` for the class name.
        roles: role map, for methods with `uses_roles`.
        allow_other_roles: take a role map that was made on other weights of a fitting shape.
        ids: token ids [C, T] of the prompts, instead of tokenizing them.
        seed: of the learned tensors' random start.
        config: the method's options as its `Config`; or give them as keywords.
        options: fields of `Config` by name.
    """

    name: ClassVar[str]  #: as in `dear adapt --method NAME`
    title: ClassVar[str]  #: as in tables
    modes: ClassVar[tuple[str, ...]] = ("default",)  #: ways to predict, the usual one first
    uses_roles: ClassVar[bool] = False
    mergeable: ClassVar[bool] = False
    open_classes: ClassVar[bool] = True  #: can name classes it was not trained on
    steady: ClassVar[bool] = False  #: every step runs the same program without waiting for the device
    recipe: ClassVar[Mapping[str, Any]] = {}  #: where its training differs from the usual recipe
    Config: ClassVar[type] = NoConfig

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
        known = {field.name for field in dataclasses.fields(cls.Config)}
        unknown = sorted(set(options) - known)
        if unknown:
            offer = f"its options are {', '.join(sorted(known))}" if known else "it has none"
            raise UsageError(f"the method {cls.name!r} has no option {unknown[0]!r}; {offer}")
        if config is not None and not isinstance(config, cls.Config):
            raise UsageError(f"config must be a {cls.Config.__name__}; got {type(config).__name__}")
        start: Any = cls.Config() if config is None else config
        return dataclasses.replace(start, **fit_options(cls.Config, options))

    # -- what a subclass writes -------------------------------------------------------------------

    def build(self, generator: torch.Generator) -> None:
        """Make the learned tensors; random numbers come from `generator` (on the CPU)."""

    def images(self, pixels: Tensor) -> Tensor:
        """Image features [B, E] of pixels [B, 3, S, S], not of unit length; here the frozen ones."""
        return self.clip.encode_image(pixels)

    def texts(self) -> Tensor:
        """Text features [C, E] of the classes; here the frozen ones of the prompts."""
        return self.prompts.frozen

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] in float32, with gradients; here CLIP's of `images` and `texts`."""
        return {self.modes[0]: scores(self.clip, self.images(pixels), self.cached("texts", self.texts))}

    def loss(self, pixels: Tensor, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """The loss of a batch: pixels [B, 3, S, S], labels [B], domain numbers [B] where there are any."""
        ce = F.cross_entropy(self(pixels)[self.modes[0]], labels)
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

    def make_room(self, state: Mapping[str, Tensor]) -> None:
        """Called before `state` is loaded: give tensors the shapes that the training set decided."""

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
        """How many numbers are learned."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def learn(self, start: Tensor) -> nn.Parameter:
        """A learned tensor that starts at `start`: on the backbone's device, at least in float32."""
        wide = torch.float64 if self.clip.dtype == torch.float64 else torch.float32
        return nn.Parameter(start.detach().to(self.clip.device, wide, copy=True))

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

    @torch.no_grad()
    def logits(self, pixels: Tensor, mode: str | None = None) -> Tensor:
        """Scores [B, C] of normalized pixels [B, 3, S, S] in one mode, without gradient."""
        mode = self.pick_mode(mode)
        return self.all_logits(pixels)[mode]

    @torch.no_grad()
    def all_logits(self, pixels: Tensor) -> dict[str, Tensor]:
        """Scores [B, C] in every mode; what the modes share is computed once."""
        pixels = pixels.to(self.clip.device)
        if self._disabled:
            frozen = scores(self.clip, self.clip.encode_image(pixels), self.prompts.frozen)
            return dict.fromkeys(self.modes, frozen)
        answers: dict[str, Tensor] = self(pixels)
        return answers

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within `with method.disabled():` logits are the frozen CLIP's, as if nothing had been learned."""
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
        self.make_room(state)
        own = self.state_dict()
        complaints = [f"{name} is missing" for name in own if name not in state]
        complaints += [f"{name} is not part of the method {self.name!r}" for name in state if name not in own]
        complaints += [
            f"{name} is {list(state[name].shape)} where {list(own[name].shape)} is expected"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ]
        complaints += [
            f"{name} is {str(state[name].dtype).removeprefix('torch.')}, another kind of number than expected"
            for name in own
            if name in state and state[name].is_floating_point() != own[name].is_floating_point()
        ]
        if complaints:
            raise RunError(f"{source} does not fit: {'; '.join(complaints)}")
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
        other = type(self)(
            self.clip,
            classes,
            template=self.template if template is None else template,
            roles=self.roles,
            allow_other_roles=self.allow_other_roles,
            ids=ids,
            config=self.config,
        )
        other.load_adapter_state(self.adapter_state())
        return other

    def use_backbone(self, clip: Clip) -> None:
        """Read another copy of the same backbone from now on (training uses one in lower precision)."""
        self._clip = (clip,)
        self.prompts = self.prompts.on(clip)
        self._cache.clear()

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, kept while no learned tensor changes; with gradients on it is computed every time."""
        if torch.is_grad_enabled():
            return compute()
        stamp = tuple((p.data_ptr(), p._version) for p in self.parameters())
        if key not in self._cache or self._cache[key][0] != stamp:
            self._cache[key] = (stamp, compute())
        return self._cache[key][1]
