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
the mean frozen feature of the training images is subtracted from image features before they are compared with
texts; the text of a trained class becomes `unit(t_c + lambda unit(r_c))`, r_c a direction from its images
(`dear.methods.directions`), lambda learned.

The forward pass, `DeAR.image_sides`, serves one adapter and, in `dear.serve.dear_stack`, batches in which
every image has another one: learned tensors then have a leading dimension B.

The step does only work whose result is used: the layers before the first token are the same for the frozen
and the adapted pass and run once without gradient; the text tower's layers before J are constant for a task;
texts end at the longest EOT; the last layer computes the rows that are read; isolated heads need no masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor

from dear.clip.correction import AppliedCorrection
from dear.clip.edit import BlockMask, Edit, LayerEdit
from dear.clip.gpu import run_concurrently
from dear.errors import RoleError, UsageError
from dear.heads.concept_words import find_attribute
from dear.heads.names import CONCEPTS, CORE
from dear.heads.roles import Role, RoleMap
from dear.methods.base import Method
from dear.methods.directions import Directions, choose_weight, compare_without_image, fit_directions
from dear.methods.frozen import Batches, Frozen, Loss, features_of
from dear.methods.options import NotNegative, Options, Positive, Preset, Share
from dear.methods.tensors import distance, indicators, label_loss, normal, unit

ISOLATIONS = ("bidirectional", "readonly")
DIRECTION_RATE = 10.0  #: learning rate of log lambda, as a multiple of the recipe's


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
        each: tokens per attribute; those of one attribute are adjacent.
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
    places = [
        a for a, name in enumerate(attributes) if role.concept and name.casefold() == role.concept.casefold()
    ]
    if role.kind == "core" and places:  # eq. 9: every query reads only the tokens of the head's attribute
        see[:, 1:] = False
        see[:, 1 + places[0] * each : 1 + (places[0] + 1) * each] = True
        return see
    see[0, 1:] = False  # eq. 8: originals do not read attribute tokens ...
    see[1:, 0] = isolation == "readonly"  # ... and vice versa
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


# The limit is more tokens than anyone means; a damaged file may name any number.
Few = Annotated[int, Meta(ge=0, le=1024)]
OneOrMore = Annotated[int, Meta(ge=1, le=1024)]


@dataclass(frozen=True)
class DeARConfig(Options):
    """Options of DeAR; the defaults are the recipe `strong`, the paper's are `DeAR.preset("paper")`."""

    attributes: tuple[str, ...] | None = None  #: those with tokens; None: the role map's core concepts
    tokens_per_attribute: OneOrMore = 1  #: an attribute's feature is the mean of its tokens' features
    first_layer: int | None = None  #: J, where tokens enter; None: the last third begins (9 of 12)
    text_first_layer: int | None = None  #: the same for text; None: J if as deep, else its last third
    text_tokens: Few = 5  #: K
    token_start: Literal["class", "free"] = "class"  #: the image's class token plus what is learned
    beta: Share = 0.1  #: weight of the raw token against the layer before (eq. 5)
    early_tokens: Few = 5  #: free tokens in every layer from `early_layer` to J - 1, a set per layer
    early_layer: int | None = None  #: where they enter; None: after a sixth of the layers (3 of 12)
    text_beta: Share | None = 0.9  #: the same for text tokens (eq. 6); None: beta
    #: "readonly": attribute tokens may read the originals
    isolation: Literal["bidirectional", "readonly"] = "bidirectional"
    lambda_reg: NotNegative = 1.0  #: weight of L_img + L_txt
    lambda_fusion: NotNegative = 0.02  #: weight of L_fusion
    class_ce: Share = 0.3  #: c: (1 - c) CE(fused logits) + c CE(decoupled logits)
    token_rate: Positive = 20.0  #: learning rate of the attribute tokens, as a multiple of the recipe's
    early_rate: Positive = 20.0  #: the same for the early tokens
    text_rate: Positive = 3.0  #: the same for the text tokens
    projection_rate: Positive = 0.5  #: the same for P_attr
    alpha_rate: Positive = 100.0  #: the same for v, whose softmax is alpha
    #: fraction of the mean training feature that is subtracted from image features before the cosine
    center: Share = 1.0
    #: what is added to the texts of trained classes: directions from their images by ridge regression; "none"
    directions: Literal["ridge", "none"] = "ridge"
    direction_ridge: Positive = 4.0  #: in units of a squared image feature; large: directions to class means
    #: lambda, the weight of a direction against a text of length 1, is this times the share of the images
    #: that frozen texts do not recognize, where classes have one image; with more images training starts at
    #: the lambda that leave-one-out on frozen features prefers
    direction_weight: Positive = 0.4
    direction_dropout: Share = 0.5  #: share of the training steps that compare by texts alone
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


class Learned(NamedTuple):
    """The learned tensors of the image side of one adapter, or of one adapter per image."""

    tokens: Tensor  #: [T, D] or [B, T, D]
    projection: Tensor  #: P_attr [D, E] or [B, D, E]
    v: Tensor  #: [1 + A] or [B, 1 + A]
    early_tokens: Tensor | None = None  #: [L, T, D] or [B, L, T, D]
    focus_mean: Tensor | None = None  #: [E] or [B, 1, E]
    image_mean: Tensor | None = None  #: [E] or [B, E]


class ImageSides(NamedTuple):
    """What class weights [C, E] are multiplied with, [B, E] each."""

    class_feature: Tensor  #: of the class token, at length 1
    decoupled: Tensor  #: the same, centered
    fused: Tensor  #: the weighted sum over the voters, centered

    def of(self, mode: str) -> Tensor:
        """The side of one of `DeAR.modes`."""
        return self.fused if mode == "fused" else self.decoupled


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
    former_options: ClassVar[Mapping[str, Any]] = {
        **{"tokens_per_layer": False, "early_beta": 1.0, "projection": "copy", "rank": 16},
        **{"fusion_loss": "log", "alpha_start": None, "direction_rate": 100.0},
    }
    can_focus: ClassVar[bool] = True
    several_labels: ClassVar[bool] = True
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
                    f"early_layer must be less than {self.entry}, the layer where attribute tokens enter, "
                    f"got {self.first}"
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
        tokens = normal(generator, len(self.attributes) * each, vision.width)
        self.tokens = self.learn(tokens, config.token_rate)
        self.text_tokens = self.learn(normal(generator, config.text_tokens, text.width), config.text_rate)
        self.p_attr = self.learn(self.clip.visual.projection_matrix(), config.projection_rate)
        self.v = self.learn(torch.zeros(1 + len(self.attributes)), config.alpha_rate)
        embed = self.clip.config.embed_dim
        for name, needed in (("focus_mean", self.focus), ("image_mean", config.center or self.directed)):
            self.register_buffer(name, self.v.new_zeros(embed) if needed else None)
        if self.directed:
            classes = len(self.trained_classes)
            weight = torch.tensor(config.direction_weight, dtype=torch.float64)
            self.log_direction_weight = self.learn(weight.log(), DIRECTION_RATE)
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
        return ("class", *self.attributes, *(("focus",) if self.focus else ()))

    # -- image side -------------------------------------------------------------------------------

    @property
    def learned(self) -> Learned:
        """What this adapter brings to the forward pass."""
        early = self.early_tokens if self.config.early_tokens else None
        return Learned(self.tokens, self.p_attr, self.v, early, self.focus_mean, self.image_mean)

    def image_edit(self, start: Tensor | None = None) -> Edit:
        """Attribute tokens and role masks of layers J to the last.

        `start`, the frozen class token at the input of layer J [B, 1, D], is needed where tokens start there.
        """
        return self.attribute_edit(self.tokens, start)

    def attribute_edit(self, tokens: Tensor, start: Tensor | None) -> Edit:
        """The same for tokens [T, D] or [B, T, D]."""
        layers = {
            layer: LayerEdit(tokens=self._raw(tokens, start), token_weight=self.config.beta, mask=mask)
            for layer, mask in self.masks.items()
        }
        return Edit(layers, count=tokens.shape[-2])

    def _raw(self, tokens: Tensor, start: Tensor | None) -> Tensor:
        """r_a, the raw attribute tokens [T, D] or [B, T, D]."""
        if self.config.token_start == "free":
            return tokens
        if start is None:
            raise UsageError("tokens that start from the class token need it at the input of layer J")
        return start.to(tokens.dtype) + tokens

    def early_edit(self, tokens: Tensor) -> Edit:
        """Early tokens [L, T, D] or [B, L, T, D]; every head reads them, for roles begin at layer J."""
        layers = {
            layer: LayerEdit(tokens=raw)  # [T, D] or [B, T, D]
            for layer, raw in enumerate(tokens.unbind(-3), self.first)
        }
        return Edit(layers, count=tokens.shape[-2])

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """Pooled vectors of the image [B, D] and of the attributes [B, A, D].

        Early tokens are dropped at layer J: what remains is what they changed in class token and patches.
        """
        visual, x, start = self.clip.visual, frozen.x, frozen.class_token
        if start is None:
            start = x[:, :1]
        if learned.early_tokens is not None:
            early = self.early_edit(learned.early_tokens)
            x = visual.run(x, self.first, self.entry - 1, early)[:, : x.shape[1]]
        edit = self.attribute_edit(learned.tokens, start.detach())
        x_cls, x = visual.class_and_tokens(x, self.entry, edit)  # [B, D], [B, T, D]
        return x_cls, x.unflatten(1, (len(self.attributes), -1)).mean(dim=2)

    def voter_features(
        self, frozen: Frozen, learned: Learned, correction: AppliedCorrection | None
    ) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, 1, E] and of the other voters [B, V, E] (eq. 10, 11)."""
        x_cls, x = self.pooled(frozen, learned)
        f_cls = self.clip.visual.project_pooled(x_cls)[:, None]
        if correction is not None:
            f_cls, x = correction.feature(f_cls), correction.pooled(x)
        others = x.to(learned.projection.dtype) @ learned.projection
        if learned.focus_mean is not None:
            assert frozen.focus is not None
            terms = frozen.focus[:, None].to(learned.focus_mean.dtype) - learned.focus_mean  # [B, 1, E]
            others = torch.cat([others, terms], dim=1)
        return f_cls, others

    def image_sides(
        self, frozen: Frozen, learned: Learned, correction: AppliedCorrection | None
    ) -> ImageSides:
        """The image side of the logits of each mode (eq. 17-19), of one adapter or one per image.

        `correction` is that of the backbone, or one for each image.
        The weighted sum of cosines with w_c is the product of w_c and the weighted sum: one matrix product.
        """
        f_cls, others = (unit(features) for features in self.voter_features(frozen, learned, correction))
        f_cls = f_cls[:, 0]
        weights = self.weights(learned.v)  # [1 + V] or [B, 1 + V]
        # ONNX has no ellipsis whose dimensions differ, so the two cases are written out
        pattern = "v,bve->be" if weights.ndim == 1 else "bv,bve->be"
        fused = weights[..., :1] * f_cls + torch.einsum(pattern, weights[..., 1:], others)
        centered = self._centered(fused, learned.image_mean, self.token_share)
        return ImageSides(f_cls, self._centered(f_cls, learned.image_mean), centered)

    @torch.no_grad()
    def prepare(self, batches: Batches) -> None:
        """Read the training images: their mean feature, class directions, what the heads of a focus add."""
        if self.focus_mean is None and self.image_mean is None:
            return
        known = [(features_of(self.clip, batch, self.focus), batch.labels) for batch in batches(False)]
        images = torch.cat([frozen.x for frozen, _ in known])  # [n, E]
        if self.image_mean is not None:
            self.image_mean.copy_(unit(images.to(self.image_mean.dtype)).mean(dim=0))
        if self.directed:
            self._fit_directions(unit(images), torch.cat([labels for _, labels in known]).to(images.device))
        if self.focus_mean is not None:
            terms = torch.cat([frozen.focus for frozen, _ in known if frozen.focus is not None])  # [n, E]
            self.focus_mean.copy_(terms.mean(dim=0))

    def _fit_directions(self, features: Tensor, labels: Tensor) -> None:
        """Class directions from unit features [n, E] and labels [n].

        Lambda starts where the leave-one-out loss on frozen features is smallest. With one image per class
        none can be left out: lambda follows from how many images the frozen texts recognize, and stays.
        """
        classes, texts = len(self.trained_classes), self.prompts.frozen
        fitted = fit_directions(features, labels, classes, self.config.direction_ridge)
        self.direction_rows.copy_(fitted.rows)
        self.direction_inverse = self.direction_rows.new_empty(fitted.inverse.shape).copy_(fitted.inverse)
        self.class_shares.copy_(fitted.shares)
        self.feature_length.copy_(fitted.length)
        self.leaves_out.copy_(fitted.leaves_out)
        if fitted.leaves_out:
            scale, center = self.clip.logit_scale, self.config.center
            weight = choose_weight(features, labels, texts, fitted, center, scale)
        else:
            centered = features - features.mean(dim=0)
            answers = (centered @ texts.to(centered).T).argmax(dim=1)
            truth = indicators(labels, classes).gather(1, answers[:, None])[:, 0]
            weight = self.config.direction_weight * (1 - truth.double()).mean().clamp(min=1e-3)
        self.log_direction_weight.copy_(weight.log())

    def finish(self) -> None:
        """Drop what training alone reads: it would be a third of the saved adapter."""
        if self.directed:
            self.direction_inverse = self.direction_inverse.new_zeros(0, 0)

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """A trained adapter has no `direction_inverse`."""
        dropped = self.directed and "direction_inverse" in state and not state["direction_inverse"].numel()
        return {"direction_inverse": (0, 0)} if dropped else {}

    def weights(self, v: Tensor) -> Tensor:
        """Weights of `voters` [..., 1 + V], which sum to 1, from v [..., 1 + A] (eq. 18)."""
        alpha, share = v.softmax(dim=-1), self.config.focus_share
        if not self.focus:
            return alpha
        return torch.cat([(1 - share) * alpha, torch.full_like(alpha[..., :1], share)], dim=-1)

    # -- text side --------------------------------------------------------------------------------

    def texts(self) -> Tensor:
        """Adapted unit text features [C, E]."""
        if not len(self.text_tokens):
            return self.prompts.frozen
        last, config = self.clip.config.text.layers, self.config
        beta = config.beta if config.text_beta is None else config.text_beta
        layers = {
            layer: LayerEdit(tokens=self.text_tokens, token_weight=beta)
            for layer in range(self.text_first, last + 1)
        }
        # Text tokens stand before the words.
        edit = Edit(layers, count=len(self.text_tokens), at=self.clip.text.first_word)
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
        """Whether the classes include trained ones, with directions, and new ones, without."""
        trained = set(self.trained_classes)
        return self.directed and 0 < sum(name in trained for name in self.classes) < len(self.classes)

    # -- logits and loss --------------------------------------------------------------------------

    def class_logits(self, images: Tensor) -> Tensor:
        """Logits [B, C] of centered image features [B, E]."""
        return self.on_one_scale(self.clip.logit_scale * images @ self.cached_weights().T, images)

    def on_one_scale(self, logits: Tensor, images: Tensor) -> Tensor:
        """Logits [B, C] in a list of trained and new classes, of centered image features [B, E].

        Texts alone determine the total probability of the trained classes, as they do for new classes;
        directions determine its distribution over the trained classes.
        """
        return logits + self._shift(logits, images) if self.joint else logits

    def _shift(self, logits: Tensor, images: Tensor) -> Tensor:
        """What `on_one_scale` adds, [B, C]: one number per image for trained classes, 0 for new ones."""
        columns = self.cached("trained_columns", self.trained_columns)
        texts = self.cached("texts", self.texts)
        by_texts = self.clip.logit_scale * images @ texts.T
        # -inf excludes new classes from both sums.
        by_texts, directed = (x.masked_fill(~columns, -math.inf) for x in (by_texts, logits))
        shift = by_texts.logsumexp(dim=1, keepdim=True) - directed.logsumexp(dim=1, keepdim=True)  # [B, 1]
        return shift * columns

    def _centered(self, features: Tensor, mean: Tensor | None, share: float = 1.0) -> Tensor:
        """Image features [..., E] without `center` times `share` of the training images' mean."""
        return features if mean is None else features - share * self.config.center * mean.to(features.dtype)

    @property
    def token_share(self) -> float:
        """The total weight of class token and attributes: 1 minus the weight of a focus."""
        return 1 - self.config.focus_share if self.focus else 1.0

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits of every mode, [B, C] each."""
        sides = self.image_sides(frozen, self.learned, self.clip.visual.correction)
        return {mode: self.class_logits(sides.of(mode)) for mode in self.modes}

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """CE + lambda_reg (L_img + L_txt) + lambda_fusion L_fusion (eq. 12-16).

        With `class_ce` = c, CE is (1 - c) CE(fused logits) + c CE(decoupled logits).
        """
        config = self.config
        # both towers at the same time: 8 to 19 % of a recorded step
        texts, sides = run_concurrently(
            self.texts,
            lambda: self.image_sides(frozen, self.learned, self.clip.visual.correction),
            self.clip.device,
        )
        logits = self._training_logits(texts, frozen, labels)
        ce = label_loss(logits(sides.fused), labels)
        fusion = -self.v.log_softmax(dim=0)[0]
        parts = {"ce": ce, "fusion": fusion}
        total = (1 - config.class_ce) * ce + config.lambda_fusion * fusion
        if config.class_ce > 0:
            parts["ce_class"] = label_loss(logits(sides.decoupled), labels)
            total = total + config.class_ce * parts["ce_class"]
        if config.lambda_reg > 0:
            assert frozen.feature is not None
            parts["reg_image"] = distance(sides.class_feature, frozen.feature)
            parts["reg_text"] = distance(texts, self.prompts.frozen)
            total = total + config.lambda_reg * (parts["reg_image"] + parts["reg_text"])
        return Loss(total, {name: part.detach() for name, part in parts.items()})

    def _training_logits(self, texts: Tensor, frozen: Frozen, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """From image features [B, E] to logits [B, C] under directions without the image itself.

        Directions that contain an image reveal its class, so that neither tokens nor lambda would learn. The
        image is represented by the frozen feature of its view. Some steps use no directions, so that texts
        stay comparable with those of new classes, which have none.
        """
        scale = self.clip.logit_scale
        if not self.directed:
            return lambda images: scale * images @ texts.T
        if not self.direction_inverse.numel():  # training is finished
            weights = self.class_weights(texts)
            return lambda images: scale * images @ weights.T
        assert self.image_mean is not None
        assert frozen.feature is not None
        kept = torch.rand((), device=texts.device) >= self.config.direction_dropout
        learned = self.log_direction_weight  # constant where no image can be left out
        weight = torch.where(self.leaves_out > 0, learned, learned.detach()).exp() * kept
        x = (frozen.feature.to(self.image_mean.dtype) - self.image_mean) / self.feature_length
        buffers = (self.direction_rows, self.direction_inverse, self.class_shares, self.feature_length)
        directions = Directions(*buffers, self.leaves_out)
        products = compare_without_image(x, labels, texts, directions, weight)
        return lambda images: scale * products(images)

    # -- features, votes and fusion weights --------------------------------------------------------

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, E] and of the attributes [B, A, E], not of unit length."""
        f_cls, others = self._voter_features(pixels)
        return f_cls[:, 0], others[:, : len(self.attributes)]

    def _voter_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, 1, E] and of the other voters [B, V, E] of pixels [B, 3, S, S]."""
        frozen = self.inference_stage(pixels.to(self.clip.device))
        return self.voter_features(frozen, self.learned, self.clip.visual.correction)

    def attribute_features(self, pixels: Tensor) -> Tensor:
        """Features in the space of each attribute, [B, A, E], not of unit length."""
        return self.image_features(pixels)[1]

    @torch.no_grad()
    def votes(self, pixels: Tensor) -> Tensor:
        """The contribution of each of `voters` to the fused logits, [B, 1 + V, C]."""
        f_cls, others = self._voter_features(pixels)
        features = unit(torch.cat([f_cls.to(others.dtype), others], dim=1))  # [B, 1 + V, E]
        tokens, focus = features.tensor_split([1 + len(self.attributes)], dim=1)
        features = torch.cat([self._centered(tokens, self.image_mean), focus], dim=1)
        shares = self.weights(self.v)[:, None]  # [1 + V, 1]
        votes = self.clip.logit_scale * shares * (features @ self.cached_weights().T)
        if self.joint:  # the shift of `on_one_scale` is divided among all voters
            mixed = (shares * features).sum(dim=1)  # [B, E]
            votes = votes + shares * self._shift(votes.sum(dim=1), mixed)[:, None]
        return votes

    def attribute_index(self, name: str) -> int:
        """Index of an attribute in `attribute_features`; case does not matter."""
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


def _layer(number: int | None, default: int, layers: int, option: str) -> int:
    """A layer number that exists."""
    if number is None:
        return default
    if not 1 <= number <= layers:
        raise UsageError(f"{option} must be from 1 to {layers}, the layers of the tower, got {number}")
    return number
