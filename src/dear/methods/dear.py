"""DeAR: attribute tokens that only the right heads may read ("Decomposing Attention Head Roles", CVPR 2026).

Attribute tokens enter the image tower at layer J (main text, section 3.3); in every later layer a token's
input is `beta r_a + (1 - beta) (what the layer before made of it)` (eq. 5, 6), and each head's role decides
who may read whom (eq. 7-9). The class token's feature stays close to the frozen one, each attribute gets a
feature of its own (eq. 10, 11), and a learned softmax weighs their votes (eq. 17-19).

Loss (eq. 12-16): `CE + lambda_reg (L_img + L_txt) + lambda_fusion (-log alpha_cls)`.

Departures: none that is known in the preset `paper`; the authors published no code. Where their text leaves
a choice, P_attr starts as a copy of CLIP's projection, isolation works both ways, one set of tokens serves
all layers, `-log alpha_cls` rather than `1 - alpha_cls`. The defaults, preset `strong`, depart further
(docs/recipes.md): free early tokens, a set per layer before J, change the class token itself; the raw tokens
from J on are `x_cls + delta_a`, x_cls the frozen class token at the input of layer J; alpha is learned fast;
image features are compared with texts after the mean frozen feature of the training images is taken off; the
text of a trained class becomes `unit(t_c + lambda unit(r_c))`, r_c a direction from its images
(`dear.methods.directions`), lambda learned.

The step does only work whose result is used: the layers before the first token are the same for the frozen
and the adapted pass and run once without gradient; the text tower's layers before J are constant for a task;
texts end at the longest EOT; the last layer computes the rows that are read; isolated heads need no masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from dear.clip.edit import BlockMask, Edit, LayerEdit
from dear.errors import RoleError, UsageError
from dear.heads.concept_words import find_attribute
from dear.heads.names import CONCEPTS, CORE
from dear.heads.roles import Role, RoleMap
from dear.methods.base import (
    Batches,
    Cut,
    Frozen,
    Loss,
    Method,
    distance,
    features_of,
    normal,
    unit,
)
from dear.methods.directions import fit_directions, leave_out
from dear.methods.options import NotNegative, Options, Positive, Preset, Share

ISOLATIONS = ("bidirectional", "readonly")


def layer_mask(
    roles: RoleMap,
    layer: int,
    attributes: Sequence[str] = CORE,
    each: int = 1,
    isolation: str = ISOLATIONS[0],
) -> BlockMask:
    """The block mask of all heads of a layer.

    A core head whose concept has no token among `attributes` has nothing to read: it is isolated like the
    other specialized heads.

    Args:
        roles: the role map.
        layer: counted from 1.
        attributes: the attributes that have tokens, in their order.
        each: tokens per attribute; those of one attribute stand side by side.
        isolation: "bidirectional", or "readonly": attribute tokens of isolated heads may read the originals.
    """
    if isolation not in ISOLATIONS:
        raise UsageError(f"isolation must be one of {', '.join(ISOLATIONS)}, got {isolation!r}")
    if layer not in roles.layers:
        raise RoleError(f"the role map has no layer {layer}; it has {', '.join(map(str, roles.layers))}")
    heads = [_see(roles[layer, h], attributes, each, isolation) for h in range(roles.heads)]
    return BlockMask(torch.stack(heads))


def _see(role: Role, attributes: Sequence[str], each: int, isolation: str) -> torch.Tensor:
    """One head's part of the mask, bool [1 + T, 1 + T]; block 0 is the original tokens."""
    see = torch.ones(1 + len(attributes) * each, 1 + len(attributes) * each, dtype=torch.bool)
    if role.kind == "mixed":
        return see
    own = [
        a for a, name in enumerate(attributes) if role.concept and name.casefold() == role.concept.casefold()
    ]
    if role.kind == "core" and own:  # eq. 9: of all attribute tokens only its own can be read, by every query
        see[:, 1:] = False
        see[:, 1 + own[0] * each : 1 + (own[0] + 1) * each] = True
        return see
    see[0, 1:] = False  # eq. 8: originals do not read attribute tokens ...
    see[1:, 0] = isolation == "readonly"  # ... nor the other way round
    return see


def draw_mask(mask: BlockMask, attributes: Sequence[str] = CORE, each: int = 1) -> str:
    """A layer's mask as text: per head one row per query and one column per key; # is seen, · is hidden.

    >>> print(draw_mask(layer_mask(RoleMap.table2(), 12)).splitlines()[0])
    head 0
    """
    short = [name[:2] + (str(i) if each > 1 else "") for name in attributes for i in range(each)]
    names = ["or", *short]  # "or": the original tokens, class token and patches
    width = max(map(len, names))
    lines = []
    for head, see in enumerate(mask.visible.tolist()):
        lines.append(f"head {head}")
        lines.append(" " * (width + 1) + " ".join(name.ljust(width) for name in names))
        for name, row in zip(names, see, strict=True):
            cells = " ".join(("#" if seen else "·").ljust(width) for seen in row)
            lines.append(f"{name.ljust(width)} {cells}".rstrip())
    return "\n".join(lines)


# The limit is more tokens or ranks than anyone means; a damaged file may name any number.
Few = Annotated[int, Meta(ge=0, le=1024)]
OneOrMore = Annotated[int, Meta(ge=1, le=1024)]


@dataclass(frozen=True)
class DeARConfig(Options):
    """Options of DeAR; the defaults are the recipe `strong`, the paper's are `DeAR.preset("paper")`."""

    attributes: tuple[str, ...] | None = None  #: those with tokens; None: the role map's core concepts
    tokens_per_attribute: OneOrMore = 1  #: an attribute's feature is the mean of its tokens' features
    tokens_per_layer: bool = False  #: a raw set of tokens per layer instead of one for all layers
    first_layer: int | None = None  #: J, where tokens enter; None: the last third begins (9 of 12)
    text_first_layer: int | None = None  #: the same for text; None: J if as deep, else its last third
    text_tokens: Few = 5  #: K
    token_start: Literal["class", "free"] = "class"  #: the image's class token plus what is learned
    beta: Share = 0.1  #: weight of the raw token against the layer before (eq. 5)
    early_tokens: Few = 5  #: free tokens in every layer from `early_layer` to J - 1, a set per layer
    early_layer: int | None = None  #: where they enter; None: after a sixth of the layers (3 of 12)
    early_beta: Share = 1.0  #: weight of a raw early token against the layer before
    text_beta: Share | None = 0.9  #: the same for text tokens (eq. 6); None: beta
    #: "readonly": attribute tokens may read the originals
    isolation: Literal["bidirectional", "readonly"] = "bidirectional"
    #: start of P_attr: "copy" of P_v, "random", or "low-rank" beside frozen P_v
    projection: Literal["copy", "random", "low-rank"] = "copy"
    rank: OneOrMore = 16  #: of the low-rank projection
    fusion_loss: Literal["log", "linear"] = "log"  #: "log": -log alpha_cls; "linear": 1 - alpha_cls
    lambda_reg: NotNegative = 1.0  #: weight of L_img + L_txt
    lambda_fusion: NotNegative = 0.02  #: weight of L_fusion
    class_ce: Share = 0.3  #: c: (1 - c) CE(fused logits) + c CE(decoupled logits)
    #: alpha_cls before training; None: the same for all, 1 / (1 + A)
    alpha_start: Annotated[float, Meta(gt=0, lt=1)] | None = None
    token_rate: Positive = 20.0  #: learning rate of the attribute tokens, as a multiple of the recipe's
    early_rate: Positive = 20.0  #: the same for the early tokens
    text_rate: Positive = 3.0  #: the same for the text tokens
    projection_rate: Positive = 0.5  #: the same for P_attr
    alpha_rate: Positive = 100.0  #: the same for v, whose softmax is alpha
    #: share of the training images' mean feature that is taken off every image feature before it is compared
    center: Share = 1.0
    #: what is added to the texts of trained classes: directions from their images by ridge regression; "none"
    directions: Literal["ridge", "none"] = "ridge"
    direction_ridge: Positive = 4.0  #: in units of a squared image feature; large: directions to class means
    #: lambda, the weight of a direction against a text of length 1, before training; with one image per class
    #: lambda is this times the share of the images that frozen texts do not recognize, and not learned
    direction_weight: Positive = 0.4
    direction_rate: Positive = 100.0  #: learning rate of log lambda, as a multiple of the recipe's
    direction_dropout: Share = 0.5  #: share of the classes that a training step compares by texts alone
    focus: tuple[tuple[int, int], ...] = ()  #: (layer, head) pairs whose frozen contribution votes as well
    focus_share: Share = 0.2  #: s: the answer is (1 - s) fused + s what these heads contribute

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attributes is not None:
            names = tuple(_concept(name) for name in self.attributes)
            if not names:
                raise UsageError("attributes is empty: DeAR needs at least one")
            if len({name.casefold() for name in names}) < len(names):
                raise UsageError(f"attributes {names} name one twice")
            object.__setattr__(self, "attributes", names)


def _concept(name: str) -> str:
    """A concept as the paper spells it; other names stay, for a role map may know them."""
    try:
        return find_attribute(name, CONCEPTS)
    except UsageError:
        return name


PRESETS = {
    "strong": Preset("free tokens prepare the class token, attribute tokens that start from it answer"),
    "quick": Preset(
        "attribute tokens that start from the class token alone: 0.6 of the time of strong",
        options={
            "early_tokens": 0,
            "center": 0.0,
            "directions": "none",
            "beta": 0.2,
            "class_ce": 0.7,
            "lambda_fusion": 0.7,
            "token_rate": 5.0,
            "projection_rate": 1.0,
            "alpha_rate": 1.0,
        },
    ),
    "paper": Preset(
        "every value of the paper and its supplement",
        options={
            "token_start": "free",
            "early_tokens": 0,
            "center": 0.0,
            "directions": "none",
            "beta": 0.9,
            "text_beta": None,
            "class_ce": 0.0,
            "lambda_fusion": 0.7,
            "token_rate": 1.0,
            "text_rate": 1.0,
            "projection_rate": 1.0,
            "alpha_rate": 1.0,
        },
        recipe={"batch": 16, "epochs": 10, "views": 0},
    ),
}


class DeAR(Method):
    """DeAR on a frozen CLIP, with the recipe `strong`; `**DeAR.preset("paper").options` are the paper's.

    Example:
        >>> import dear, torch
        >>> from dear.heads.roles import RoleMap
        >>> clip = dear.Clip(dear.ClipConfig.named("ViT-B-32"))
        >>> ids = torch.tensor([[49406, 320, 2368, 49407], [49406, 320, 1929, 49407]])
        >>> model = DeAR(clip, ["cat", "dog"], roles=RoleMap.table2(), ids=ids)
        >>> model.trainable_parameters, model.logits(torch.zeros(1, 3, 224, 224), mode="decoupled").shape
        (422663, torch.Size([1, 2]))
    """

    name: ClassVar[str] = "dear"
    title: ClassVar[str] = "DeAR"
    about: ClassVar[str] = "attribute tokens that reach only the heads with their role; the default"
    first: int
    cut: int = 1  # `build` sets the layer
    modes: ClassVar[tuple[str, ...]] = ("fused", "decoupled")
    uses_roles: ClassVar[bool] = True
    recipe: ClassVar[Mapping[str, Any]] = {"batch": 4}
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    Config: ClassVar[type] = DeARConfig
    can_focus: ClassVar[bool] = True
    config: DeARConfig
    focus_mean: Tensor | None  #: of the training images [E]; None without a focus
    #: frozen unit feature, mean of the training images [E]; None without `center` and `directions`
    image_mean: Tensor | None
    direction_rows: Tensor  #: class directions R [C, E] of the trained classes (`dear.methods.directions`)
    direction_inverse: Tensor  #: A [E, E]; empty after training, which alone reads it
    class_shares: Tensor  #: of the training images [C]
    feature_length: Tensor  #: []
    leaves_out: Tensor  #: []; 1: some class has two training images or more, so that one can be left out

    def build(self, generator: torch.Generator) -> None:
        """Learned tensors: attribute tokens, text tokens, P_attr, and v (eq. 5, 6, 11, 18)."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        self.roles = self._take_roles(self.roles)
        known = tuple(dict.fromkeys((*self.roles.core, *CONCEPTS)))
        self.attributes = tuple(find_attribute(a, known) for a in config.attributes or self.roles.core)
        if config.attributes is not None:  # masks compare names: keep them as the role map spells them
            self.config = config = replace(config, attributes=self.attributes)
        self.entry = _layer(config.first_layer, vision.last_third[0], vision.layers, "first_layer")
        self.first = self.entry
        if config.early_tokens:
            usual = min(max(1, vision.layers // 6 + 1), self.entry - 1)
            self.first = _layer(config.early_layer, usual, vision.layers, "early_layer")
            if not 1 <= self.first < self.entry:
                raise UsageError(
                    f"early tokens need a layer before layer {self.entry}, where attribute tokens enter; "
                    f"early_layer is {self.first}"
                )
        self.cut = self.first
        self.reads_frozen = config.lambda_reg > 0 or self.directed
        if config.early_tokens and config.token_start == "class":
            self.class_token_at = self.entry
        same = self.entry if text.layers == vision.layers else text.last_third[0]
        self.text_first = _layer(config.text_first_layer, same, text.layers, "text_first_layer")
        each = config.tokens_per_attribute
        self.masks: Mapping[int, BlockMask] = {
            layer: layer_mask(self.roles, layer, self.attributes, each, config.isolation)
            for layer in range(self.entry, vision.layers + 1)
        }

        def raw(first: int, layers: int, count: int, width: int) -> Tensor:
            sets = (layers - first + 1,) if config.tokens_per_layer else ()
            return normal(generator, *sets, count, width)

        own = raw(self.entry, vision.layers, len(self.attributes) * each, vision.width)
        self.tokens = self.learn(own, config.token_rate)
        own = raw(self.text_first, text.layers, config.text_tokens, text.width)
        self.text_tokens = self.learn(own, config.text_rate)
        shape = (vision.width, self.clip.config.embed_dim)
        if config.projection == "low-rank":
            down = normal(generator, shape[0], config.rank, std=shape[0] ** -0.5)
            self.p_down = self.learn(down, config.projection_rate)
            self.p_up = self.learn(torch.zeros(config.rank, shape[1]), config.projection_rate)
        else:
            start = self.clip.visual.space_matrix()
            if config.projection == "random":
                start = normal(generator, *shape, std=shape[0] ** -0.5)
            self.p_attr = self.learn(start, config.projection_rate)
        v = torch.zeros(1 + len(self.attributes), dtype=torch.float64)
        if config.alpha_start is not None:  # softmax(v)[0] = alpha_start, the attributes share the rest
            v[0] = math.log(config.alpha_start * len(self.attributes) / (1 - config.alpha_start))
        self.v = self.learn(v, config.alpha_rate)
        embed = self.clip.config.embed_dim
        for name, needed in (("focus_mean", config.focus), ("image_mean", config.center or self.directed)):
            self.register_buffer(name, self.v.new_zeros(embed) if needed else None)
        if self.directed:
            classes = len(self.trained_classes)
            weight = torch.tensor(config.direction_weight, dtype=torch.float64)
            self.log_direction_weight = self.learn(weight.log(), config.direction_rate)
            self.register_buffer("direction_rows", self.v.new_zeros(classes, embed))
            self.register_buffer("direction_inverse", self.v.new_zeros(embed, embed))
            self.register_buffer("class_shares", self.v.new_zeros(classes))
            self.register_buffer("feature_length", self.v.new_ones(()))
            self.register_buffer("leaves_out", self.v.new_zeros(()))
        if config.early_tokens:
            sets = (self.entry - self.first, config.early_tokens, vision.width)
            self.early_tokens = self.learn(normal(generator, *sets), config.early_rate)

    def _take_roles(self, roles: RoleMap | None) -> RoleMap:
        """The role map to use, checked against the backbone."""
        if roles is None:
            vision = self.clip.config.vision
            raise RoleError(
                f"DeAR needs a role map for this tower of {vision.layers} x {vision.heads} heads: "
                "compute one with dear.discover_roles and pass it as roles",
                hint="roles",
            )
        self.notice = roles.check(self.clip, self.allow_other_roles)
        return roles

    @property
    def directed(self) -> bool:
        """Whether trained classes have directions from their images in addition to texts."""
        return self.config.directions != "none"

    @property
    def voters(self) -> tuple[str, ...]:
        """Names of what votes in the fused answer: the class token, the attributes, the heads of a focus."""
        return ("class", *self.attributes, *(("focus",) if self.config.focus else ()))

    # -- image side -------------------------------------------------------------------------------

    def image_edit(self, start: Tensor | None = None) -> Edit:
        """Attribute tokens and role masks of layers J to the last.

        `start`, the frozen class token at the input of layer J [B, 1, D], is needed where tokens start there.
        """
        return self.attribute_edit([_raw(self.tokens, i) for i in range(len(self.masks))], start)

    def attribute_edit(self, learned: Sequence[Tensor], start: Tensor | None) -> Edit:
        """The same for any learned tokens, one [T, D] or [B, T, D] per layer."""
        if self.config.token_start == "class":
            if start is None:
                raise UsageError("tokens that start from the class token need it at the input of layer J")
            learned = [start.to(tokens.dtype) + tokens for tokens in learned]
        layers = {
            layer: LayerEdit(tokens=tokens, token_weight=self.config.beta, mask=mask)
            for tokens, (layer, mask) in zip(learned, self.masks.items(), strict=True)
        }
        return Edit(layers, count=learned[0].shape[-2])

    def early_edit(self, learned: Sequence[Tensor]) -> Edit:
        """Early tokens, one [T, D] or [B, T, D] per layer; every head reads them: roles begin at layer J."""
        layers = {
            layer: LayerEdit(tokens=tokens, token_weight=self.config.early_beta)
            for layer, tokens in enumerate(learned, self.first)
        }
        return Edit(layers, count=learned[0].shape[-2])

    def pooled(
        self, frozen: Frozen, learned: Sequence[Tensor], early: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Pooled vectors of the image [B, D] and of the attributes [B, A, D] from the frozen stage.

        Early tokens are gone at layer J: what they leave is what they changed in class token and patches.
        """
        visual, x = self.clip.visual, frozen[0]
        if early:
            x = visual.run(x, self.first, self.entry - 1, self.early_edit(early))[:, : x.shape[1]]
        edit = self.attribute_edit(learned, self._start(frozen))
        x_cls, x = visual.class_and_tokens(x, self.entry, edit)
        return x_cls, x.unflatten(1, (len(self.attributes), -1)).mean(dim=2)

    def _start(self, frozen: Frozen) -> Tensor | None:
        """The frozen class token at the input of layer J [B, 1, D]; None for free tokens."""
        if self.config.token_start == "free":
            return None
        return (frozen[1] if self.config.early_tokens else frozen[0][:, :1]).detach()

    @torch.no_grad()
    def prepare(self, batches: Batches) -> None:
        """Read the training images: their mean feature, class directions, what the heads of a focus add."""
        if self.focus_mean is None and self.image_mean is None:
            return
        walked = [(features_of(self.clip, batch), batch.labels) for batch in batches(False)]
        features = torch.cat([rows for rows, _ in walked])
        images, focus = self.clip.parts(features)
        if self.image_mean is not None:
            self.image_mean.copy_(unit(images.to(self.image_mean.dtype)).mean(dim=0))
        if self.directed:
            self._fit_directions(unit(images), torch.cat([labels for _, labels in walked]).to(images.device))
        if self.focus_mean is not None and focus is not None:
            self.focus_mean.copy_(focus.mean(dim=0))

    def _fit_directions(self, features: Tensor, labels: Tensor) -> None:
        """Class directions from unit features [n, E] and labels [n].

        With one image per class none can be left out, so that lambda cannot be learned: it follows from how
        many of the images the frozen texts recognize.
        """
        fitted = fit_directions(features, labels, len(self.trained_classes), self.config.direction_ridge)
        self.direction_rows.copy_(fitted.rows)
        self.direction_inverse = self.direction_rows.new_empty(fitted.inverse.shape).copy_(fitted.inverse)
        self.class_shares.copy_(fitted.shares)
        self.feature_length.copy_(fitted.length)
        several = bool(fitted.counts.max() > 1)
        self.leaves_out.fill_(several)
        if not several:
            centered = features - features.mean(dim=0)
            answers = (centered @ self.prompts.frozen.to(centered).T).argmax(dim=1)
            unknown = (answers != labels).double().mean().clamp(min=1e-3)
            self.log_direction_weight.copy_((self.config.direction_weight * unknown).log())

    def finish(self) -> None:
        """Drop what training alone reads: it would be a third of the saved adapter."""
        if self.directed:
            self.direction_inverse = self.direction_inverse.new_zeros(0, 0)

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """A trained adapter has no `direction_inverse`."""
        dropped = self.directed and "direction_inverse" in state and not state["direction_inverse"].numel()
        return {"direction_inverse": (0, 0)} if dropped else {}

    def stages(self, pixels: Tensor) -> tuple[Frozen, Tensor, Cut]:
        """With a focus, also what its heads contribute to the frozen image feature [B, E]."""
        stage, x, at = super().stages(pixels)
        focus, visual = self.clip.focus, self.clip.visual
        if not focus:
            return stage, x, at
        with torch.no_grad():
            if isinstance(at, int) and at <= focus[0][0]:  # go on where the tower was run to
                _, terms = visual.features_and_terms(x, at, (focus,))
            else:
                _, terms = visual.features_and_terms(visual.embed(pixels), 1, (focus,))
        return (*stage, *terms), x, at

    def _adapted(self, frozen: Frozen) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, E] and of the other voters [B, V, E] from the frozen stage."""
        visual = self.clip.visual
        learned = [_raw(self.tokens, i) for i in range(len(self.masks))]
        x_cls, own = self.pooled(frozen, learned, list(self.early_tokens) if self.config.early_tokens else ())
        others = self._project(visual.correct_pooled(own))
        if self.focus_mean is not None:
            others = torch.cat([others, self.focused(frozen, self.focus_mean)], dim=1)
        return visual.correct(visual.into_space(x_cls)), others

    def focused(self, frozen: Frozen, mean: Tensor) -> Tensor:
        """What the heads of the focus contribute, less its mean: [B, 1, E], not of unit length."""
        return frozen[1 if self.class_token_at is None else 2][:, None].to(mean.dtype) - mean

    def weights(self, v: Tensor) -> Tensor:
        """Weights of `voters` [..., 1 + V], which sum to 1, from v [..., 1 + A] (eq. 18)."""
        alpha, share = v.softmax(dim=-1), self.config.focus_share
        if not self.config.focus:
            return alpha
        return torch.cat([(1 - share) * alpha, torch.full_like(alpha[..., :1], share)], dim=-1)

    def _project(self, x: Tensor) -> Tensor:
        """P_attr of normed attribute tokens: [B, A, D] -> [B, A, E] (eq. 11)."""
        if self.config.projection == "low-rank":
            low = x.to(self.p_down.dtype) @ self.p_down @ self.p_up
            return self.clip.visual.into_space(x).to(low.dtype) + low
        return x.to(self.p_attr.dtype) @ self.p_attr

    # -- text side --------------------------------------------------------------------------------

    def texts(self) -> Tensor:
        """Adapted unit text features [C, E]."""
        if self.text_tokens.shape[-2] == 0:
            return self.prompts.frozen
        last, config = self.clip.config.text.layers, self.config
        beta = config.beta if config.text_beta is None else config.text_beta
        layers = {
            layer: LayerEdit(tokens=_raw(self.text_tokens, i), token_weight=beta)
            for i, layer in enumerate(range(self.text_first, last + 1))
        }
        edit = Edit(
            layers, count=self.text_tokens.shape[-2], at=self.clip.text.first_word
        )  # before the words
        return unit(self.prompts.features(edit, first=self.text_first))

    def class_weights(self, texts: Tensor) -> Tensor:
        """What image features are compared with [C, E]: texts, those of trained classes with directions."""
        if not self.directed:
            return texts
        places = {name: row for row, name in enumerate(self.trained_classes)}
        rows = [places.get(name, 0) for name in self.classes]
        added = self.log_direction_weight.exp() * unit(self.direction_rows)[rows]
        return torch.where(self.trained_columns()[:, None], unit(texts + added), texts)

    def cached_weights(self) -> Tensor:
        """`class_weights` of the present texts [C, E]."""
        texts = self.cached("texts", self.texts)
        return self.cached("weights", lambda: self.class_weights(texts)) if self.directed else texts

    def trained_columns(self) -> Tensor:
        """Which classes were trained, bool [C]."""
        trained = set(self.trained_classes)
        return torch.tensor([name in trained for name in self.classes], device=self.v.device)

    @cached_property
    def joint(self) -> bool:
        """Whether the list holds trained classes with directions and new ones, which have none."""
        trained = set(self.trained_classes)
        return self.directed and 0 < sum(name in trained for name in self.classes) < len(self.classes)

    # -- logits and loss --------------------------------------------------------------------------

    def class_logits(self, images: Tensor) -> Tensor:
        """Logits [B, C] of centered image features [B, E]."""
        return self.on_one_scale(self.clip.logit_scale * images @ self.cached_weights().T, images)

    def on_one_scale(self, logits: Tensor, images: Tensor) -> Tensor:
        """Logits [B, C] in a list of trained and new classes, of centered image features [B, E].

        Texts alone decide how likely the trained classes are together, as they do for new classes;
        directions decide which of the trained classes it is.
        """
        return logits + self._shift(logits, images) if self.joint else logits

    def _shift(self, logits: Tensor, images: Tensor) -> Tensor:
        """What `on_one_scale` adds, [B, C]: one number per image for trained classes, 0 for new ones."""
        columns = self.cached("trained_columns", self.trained_columns)
        texts = self.cached("texts", self.texts)
        by_texts = self.clip.logit_scale * images @ texts.T
        # -inf: new classes count in neither sum.
        by_texts, own = (x.masked_fill(~columns, -math.inf) for x in (by_texts, logits))
        shift = by_texts.logsumexp(dim=1, keepdim=True) - own.logsumexp(dim=1, keepdim=True)
        return shift * columns

    def centered(self, features: Tensor, mean: Tensor | None, share: float = 1.0) -> Tensor:
        """Image features [..., E] without `center` times `share` of the training images' mean."""
        return features if mean is None else features - share * self.config.center * mean.to(features.dtype)

    @property
    def own_share(self) -> float:
        """The weight of class token and attributes together: what a focus leaves them."""
        return 1 - self.config.focus_share if self.config.focus else 1.0

    def _mixed(self, f_cls: Tensor, others: Tensor) -> Tensor:
        """The image side of the fused logits, [B, E], from unit features (eq. 17-19).

        The weighted sum of cosines with w_c is the product of w_c and the weighted sum: one matrix product.
        """
        weights = self.weights(self.v)
        mixed = weights[0] * f_cls + torch.einsum("a,bae->be", weights[1:], others)
        return self.centered(mixed, self.image_mean, self.own_share)

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] each."""
        f_cls, f_attr = (unit(f) for f in self._adapted(frozen))
        images = {"fused": self._mixed(f_cls, f_attr), "decoupled": self.centered(f_cls, self.image_mean)}
        return {mode: self.class_logits(features) for mode, features in images.items()}

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """CE + lambda_reg (L_img + L_txt) + lambda_fusion L_fusion (eq. 12-16).

        With `class_ce` = c, CE is (1 - c) CE(fused logits) + c CE(decoupled logits).
        """
        config = self.config
        texts = self.texts()
        f_cls, f_attr = (unit(f) for f in self._adapted(frozen))
        logits = self._training_logits(texts, frozen, labels)
        ce = F.cross_entropy(logits(self._mixed(f_cls, f_attr)), labels)
        log_alpha = self.v.log_softmax(dim=0)[0]
        fusion = -log_alpha if config.fusion_loss == "log" else 1 - log_alpha.exp()
        parts = {"ce": ce, "fusion": fusion}
        total = (1 - config.class_ce) * ce + config.lambda_fusion * fusion
        if config.class_ce > 0:
            parts["ce_class"] = F.cross_entropy(logits(self.centered(f_cls, self.image_mean)), labels)
            total = total + config.class_ce * parts["ce_class"]
        if config.lambda_reg > 0:
            parts["reg_image"] = distance(f_cls, frozen[-1])
            parts["reg_text"] = distance(texts, self.prompts.frozen)
            total = total + config.lambda_reg * (parts["reg_image"] + parts["reg_text"])
        return Loss(total, {name: part.detach() for name, part in parts.items()})

    def _training_logits(self, texts: Tensor, frozen: Frozen, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """From image features [B, E] to logits [B, C] under directions without the image itself.

        Directions that contain an image name its class at once, and neither tokens nor lambda would learn.
        The frozen feature of the view stands for the image. In each step some classes have no direction, so
        that texts stay comparable with those of new classes, which have none.
        """
        scale = self.clip.logit_scale
        if not self.directed:
            return lambda images: scale * images @ texts.T
        assert self.image_mean is not None
        kept = torch.rand(len(texts), device=texts.device) >= self.config.direction_dropout
        learned = self.log_direction_weight  # constant where no image can be left out
        weight = torch.where(self.leaves_out > 0, learned, learned.detach()).exp() * kept  # [C]
        weights = texts + weight[:, None] * unit(self.direction_rows)
        size = weights.norm(dim=-1)  # [C]
        weights = weights / size[:, None]
        if not self.direction_inverse.numel():  # training is finished
            return lambda images: scale * images @ weights.T
        x = (frozen[-1].to(self.image_mean.dtype) - self.image_mean) / self.feature_length
        change, moved = leave_out(x, labels, self.direction_rows, self.direction_inverse, self.class_shares)
        lengths = self.direction_rows.norm(dim=-1).clamp(min=1e-12)
        change = self.leaves_out * change * weight / (lengths * size)  # [B, C]

        def logits(images: Tensor) -> Tensor:
            cosines: Tensor = images @ weights.T - change * (images * moved).sum(dim=-1, keepdim=True)
            return scale * cosines

        return logits

    # -- what DeAR knows beside the answer --------------------------------------------------------

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, E] and of the attributes [B, A, E], not of unit length."""
        f_cls, others = self._adapted(self.inference_stage(pixels.to(self.clip.device)))
        return f_cls, others[:, : len(self.attributes)]

    def attribute_features(self, pixels: Tensor) -> Tensor:
        """Features in each attribute's own space, [B, A, E], not of unit length."""
        return self.image_features(pixels)[1]

    @torch.no_grad()
    def votes(self, pixels: Tensor) -> Tensor:
        """What each of `voters` adds to the fused logits, [B, 1 + V, C]."""
        f_cls, others = self._adapted(self.inference_stage(pixels.to(self.clip.device)))
        features = unit(torch.cat([f_cls[:, None].to(others.dtype), others], dim=1))  # [B, 1 + V, E]
        own, focus = features.tensor_split([1 + len(self.attributes)], dim=1)
        features = torch.cat([self.centered(own, self.image_mean), focus], dim=1)
        shares = self.weights(self.v)[:, None]  # [1 + V, 1]
        votes = self.clip.logit_scale * shares * (features @ self.cached_weights().T)
        if self.joint:  # what the scale of the list changes belongs to all voters
            mixed = (shares * features).sum(dim=1)  # [B, E]
            votes = votes + shares * self._shift(votes.sum(dim=1), mixed)[:, None]
        return votes

    def attribute_index(self, name: str) -> int:
        """Place of an attribute in `attribute_features`, whatever the case of its name."""
        return self.attributes.index(find_attribute(name, self.attributes))

    def fusion_weights(self) -> dict[str, float]:
        """The weight of each of `voters` (alpha, without a focus); they sum to 1."""
        return dict(zip(self.voters, self.weights(self.v.detach().double()).tolist(), strict=True))

    def facts(self) -> dict[str, Any]:
        """The fusion weights, and the weight of class directions against texts."""
        weights: dict[str, Any] = {"fusion_weights": self.fusion_weights()}
        if self.directed:
            weights["direction_weight"] = float(self.log_direction_weight.detach().double().exp())
        return weights


def _raw(tokens: Tensor, place: int) -> Tensor:
    """The raw tokens of one layer: the shared set, or the layer's own."""
    return tokens if tokens.ndim == 2 else tokens[place]


def _layer(asked: int | None, default: int, layers: int, option: str) -> int:
    """A layer number that exists."""
    if asked is None:
        return default
    if not 1 <= asked <= layers:
        raise UsageError(f"{option} must be from 1 to {layers}, the layers of the tower, got {asked}")
    return asked
