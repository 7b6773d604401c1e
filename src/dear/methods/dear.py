"""DeAR: attribute tokens that only the right heads may read ("Decomposing Attention Head Roles", CVPR 2026).

Attribute tokens enter the image tower at layer J (main text, section 3.3); in every later layer a token's
input is `beta r_a + (1 - beta) (output of the previous layer)` (eq. 5, 6), and each head's role determines
which tokens may attend to which (eq. 7-9). The class token's feature is regularized toward the frozen one,
each attribute has a feature (eq. 10, 11), and a learned softmax weighs their logits (eq. 17-19).

Loss (eq. 12-16): `CE + lambda_reg (L_img + L_txt) + lambda_fusion (-log alpha_cls)`.

Departures: none known in the preset `paper`; the authors published no code. Where their text leaves a choice,
P_attr is initialized to CLIP's projection, isolation is bidirectional, all layers share one set of tokens,
and the fusion loss is `-log alpha_cls` rather than `1 - alpha_cls`. The defaults, preset `strong`, depart
further (docs/recipes.md): free early tokens, one set per layer before J, change the class token itself; the
raw tokens from J on are `x_cls + delta_a`, x_cls the frozen class token at the input of layer J; alpha has a
high learning rate; the mean frozen feature of the training images is subtracted from image features before
they are compared with texts; the text feature of a trained class becomes `unit(t_c + lambda unit(r_c))`, r_c
a direction from its images (`dear.methods.directions`), lambda learned.

The forward pass, `DeAR.image_sides`, is used for one adapter and, in `dear.serve.dear_stack`, for batches in
which every image has its own adapter: learned tensors then have a leading dimension B.

A training step skips all work that cannot change the result: the layers before the first token are the same
in the frozen and the adapted pass and run once without gradients; the text tower's layers before J are
constant for a task; texts end at the longest EOT; the last layer computes only the rows that are read;
isolated heads need no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dear.clip.correction import AppliedCorrection
from dear.clip.edit import BlockMask, Edit, LayerEdit
from dear.clip.gpu import run_concurrently
from dear.data.folds import IntArray
from dear.errors import RoleError, UsageError
from dear.heads.concept_words import find_attribute
from dear.heads.names import CONCEPTS
from dear.heads.roles import RoleMap
from dear.methods.base import Method
from dear.methods.class_rows import ClassRows
from dear.methods.dear_config import PRESETS, DeARConfig
from dear.methods.directions import (
    Directions,
    add_directions,
    align_totals,
    compare_without_image,
    fit_directions,
    initial_weight,
)
from dear.methods.frozen import Batches, Frozen, Loss, features_of
from dear.methods.options import Preset
from dear.methods.role_masks import layer_mask
from dear.methods.tensors import distance, label_loss, normal, unit

DIRECTION_RATE = 30.0  #: learning rate of log lambda, as a multiple of the recipe's


class Learned(NamedTuple):
    """Learned tensors of the image tower, of one adapter or of one adapter per image."""

    tokens: Tensor  #: of the attributes [A, D] or [B, A, D]
    projection: Tensor  #: P_attr [D, E] or [B, D, E]
    v: Tensor  #: [1 + A] or [B, 1 + A]
    early_tokens: Tensor | None = None  #: [L, T, D] or [B, L, T, D]
    focus_mean: Tensor | None = None  #: [E] or [B, 1, E]
    image_mean: Tensor | None = None  #: [E] or [B, E]


class ImageSides(NamedTuple):
    """Image features that are multiplied with the class weights [C, E], [B, E] each."""

    class_feature: Tensor  #: unit feature of the class token
    decoupled: Tensor  #: `class_feature`, centered
    fused: Tensor  #: weighted sum of the voters' unit features, centered

    def of(self, mode: str) -> Tensor:
        """The feature for one of `DeAR.modes`."""
        return self.fused if mode == "fused" else self.decoupled


class DeAR(Method):
    """DeAR on a frozen CLIP, by default `strong`; `**DeAR.preset("paper").options` are the paper's options.

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
    holds_out: ClassVar[bool] = True
    uses_roles: ClassVar[bool] = True
    recipe: ClassVar[Mapping[str, Any]] = {"batch": 4}
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    Config: ClassVar[type] = DeARConfig
    former_options: ClassVar[Mapping[str, Any]] = {
        **{"tokens_per_layer": False, "early_beta": 1.0, "projection": "copy", "rank": 16},
        **{"fusion_loss": "log", "alpha_start": None, "direction_rate": 100.0},
        **{"tokens_per_attribute": 1, "text_first_layer": None, "early_layer": None},
    }
    can_focus: ClassVar[bool] = True
    several_labels: ClassVar[bool] = True
    config: DeARConfig
    focus_mean: Tensor | None  #: mean focus term of the training images [E]; None without a focus
    #: mean frozen unit feature of the training images [E]; None without `center` and `directions`
    image_mean: Tensor | None
    direction_rows: Tensor  #: class directions R [C, E] of the trained classes (`dear.methods.directions`)
    direction_inverse: Tensor  #: A [E, E]; only training reads it, and empties it at the end
    class_shares: Tensor  #: fraction of the training images in each class [C]
    feature_length: Tensor  #: mean length of a centered feature []
    leaves_out: Tensor  #: []; 1: some class has two training images that differ, so one can be left out

    def build(self, generator: torch.Generator) -> None:
        """Learned tensors: attribute tokens, text tokens, P_attr, and v (eq. 5, 6, 11, 18)."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        self.roles = self._check_roles(self.roles)
        names = tuple(dict.fromkeys((*self.roles.core, *CONCEPTS)))
        self.attributes = tuple(find_attribute(name, names) for name in config.attributes or self.roles.core)
        if config.attributes is not None:  # masks compare names: use the spelling of the role map
            self.config = config = replace(config, attributes=self.attributes)
        self.entry = self.first = self._entry_layer()
        if config.early_tokens:
            self.first = min(vision.layers // 6 + 1, self.entry - 1)
        self.cut = self.first
        self.reads_frozen = config.lambda_reg > 0 or self.uses_directions
        if config.early_tokens and config.token_start == "class":
            self.class_token_at = self.entry
        self.text_first = self.entry if text.layers == vision.layers else text.last_third[0]
        self.masks: Mapping[int, BlockMask] = {
            layer: layer_mask(self.roles, layer, self.attributes, config.isolation)
            for layer in range(self.entry, vision.layers + 1)
        }
        tokens = normal(generator, len(self.attributes), vision.width)
        self.tokens = self.learn(tokens, config.token_rate)
        self.text_tokens = self.learn(normal(generator, config.text_tokens, text.width), config.text_rate)
        self.p_attr = self.learn(self.clip.visual.projection_matrix(), config.projection_rate)
        self.v = self.learn(torch.zeros(1 + len(self.attributes)), config.alpha_rate)
        embed = self.clip.config.embed_dim
        for name, needed in (
            ("focus_mean", self.focus),
            ("image_mean", config.center or self.uses_directions),
        ):
            self.register_buffer(name, self.v.new_zeros(embed) if needed else None)
        if self.uses_directions:
            classes = len(self.trained_classes)
            weight = torch.tensor(config.direction_weight, dtype=torch.float64)
            self.log_direction_weight = self.learn(weight.log(), DIRECTION_RATE)
            self.register_buffer("direction_rows", self.v.new_zeros(classes, embed))
            self.register_buffer("direction_inverse", self.v.new_zeros(embed, embed))
            self.register_buffer("class_shares", self.v.new_zeros(classes))
            self.register_buffer("feature_length", self.v.new_ones(()))
            self.register_buffer("leaves_out", self.v.new_zeros(()))
        if config.early_tokens:
            shape = (self.entry - self.first, config.early_tokens, vision.width)
            self.early_tokens = self.learn(normal(generator, *shape), config.early_rate)

    def _entry_layer(self) -> int:
        """J, the layer of the image tower where attribute tokens enter."""
        vision, early = self.clip.config.vision, self.config.early_tokens > 0
        layer = vision.last_third[0] if self.config.first_layer is None else self.config.first_layer
        if not 1 + early <= layer <= vision.layers:
            reason = (
                ", and early tokens need a layer before it (early_tokens=0 leaves them out)" if early else ""
            )
            raise UsageError(
                f"first_layer must be from {1 + early} to {vision.layers}, the layers of the tower{reason}, "
                f"got {layer}"
            )
        return layer

    def _check_roles(self, roles: RoleMap | None) -> RoleMap:
        """The role map, checked against the backbone."""
        if roles is None:
            vision = self.clip.config.vision
            raise RoleError(
                f"DeAR needs a role map for this tower of {vision.layers} x {vision.heads} heads, got none; "
                "compute one with dear.discover_roles and pass it as roles",
                hint="roles",
            )
        self.notice = roles.check(self.clip, self.allow_other_roles)
        return roles

    @property
    def uses_directions(self) -> bool:
        """Whether trained classes have directions from their images in addition to texts."""
        return self.config.directions != "none"

    @property
    def voters(self) -> tuple[str, ...]:
        """Names of the features in the fused logits: class token, attributes, and the heads of a focus."""
        return ("class", *self.attributes, *(("focus",) if self.focus else ()))

    def share_learned(self, source: Method) -> None:
        """Use the learned tensors and the role masks of another DeAR."""
        super().share_learned(source)
        assert isinstance(source, DeAR)
        self.masks = source.masks  # about 1 MB once they are expanded

    # -- image tower -------------------------------------------------------------------------------

    @property
    def learned(self) -> Learned:
        """The learned tensors that the image forward pass reads."""
        early = self.early_tokens if self.config.early_tokens else None
        return Learned(self.tokens, self.p_attr, self.v, early, self.focus_mean, self.image_mean)

    def attribute_edit(self, tokens: Tensor, start: Tensor | None) -> Edit:
        """Attribute tokens [A, D] or [B, A, D] and role masks of layers J to the last.

        `start` is the frozen class token at the input of layer J, [B, 1, D]; required if `token_start` is
        "class".
        """
        beta = self.config.beta
        layers = {
            layer: LayerEdit(tokens=self._raw_tokens(tokens, start), token_weight=beta, mask=mask)  # eq. 5
            for layer, mask in self.masks.items()
        }
        return Edit(layers, count=tokens.shape[-2])

    def _raw_tokens(self, tokens: Tensor, start: Tensor | None) -> Tensor:
        """r_a, the raw attribute tokens [A, D] or [B, A, D]."""
        if self.config.token_start == "free":
            return tokens
        if start is None:
            raise UsageError(
                'start must be the class token at the input of layer J if token_start is "class", got None'
            )
        return start.to(tokens.dtype) + tokens

    def early_edit(self, tokens: Tensor) -> Edit:
        """Early tokens [L, T, D] or [B, L, T, D], visible to every head because roles start at layer J."""
        layers = {
            layer: LayerEdit(tokens=layer_tokens)  # [T, D] or [B, T, D]
            for layer, layer_tokens in enumerate(tokens.unbind(-3), self.first)
        }
        return Edit(layers, count=tokens.shape[-2])

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """Pooled vectors of the image [B, D] and of the attributes [B, A, D].

        Early tokens are removed at layer J; their effect on the class token and the patches remains.
        """
        visual, x, start = self.clip.visual, frozen.x, frozen.class_token
        if start is None:
            start = x[:, :1]
        if learned.early_tokens is not None:
            early = self.early_edit(learned.early_tokens)
            x = visual.run(x, self.first, self.entry - 1, early)[:, : x.shape[1]]
        edit = self.attribute_edit(learned.tokens, start.detach())
        return visual.class_and_tokens(x, self.entry, edit)

    def voter_features(
        self, frozen: Frozen, learned: Learned, correction: AppliedCorrection | None
    ) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, 1, E] and of the other voters [B, V, E] (eq. 10, 11)."""
        x_cls, x = self.pooled(frozen, learned)
        f_cls = self.clip.visual.project_pooled(x_cls)[:, None]  # [B, D] -> [B, 1, E]
        if correction is not None:
            f_cls, x = correction.feature(f_cls), correction.pooled(x)
        f_voters = x.to(learned.projection.dtype) @ learned.projection  # [B, A, D] -> [B, A, E]
        if learned.focus_mean is not None:
            assert frozen.focus is not None
            terms = frozen.focus[:, None].to(learned.focus_mean.dtype) - learned.focus_mean  # [B, 1, E]
            f_voters = torch.cat([f_voters, terms], dim=1)  # [B, A + 1, E]
        return f_cls, f_voters

    def image_sides(
        self, frozen: Frozen, learned: Learned, correction: AppliedCorrection | None
    ) -> ImageSides:
        """The image features for the logits of each mode (eq. 17-19), of one adapter or of one per image.

        `correction` is that of the backbone, or stacked, one per image. The alpha-weighted sum of cosines
        with w_c equals the product of w_c and the weighted sum of features, so one product is enough.
        """
        f_cls, f_voters = (unit(features) for features in self.voter_features(frozen, learned, correction))
        f_cls = f_cls[:, 0]  # [B, 1, E] -> [B, E]
        weights = self.weights(learned.v)  # [1 + V] or [B, 1 + V]
        # ONNX does not support an ellipsis of different lengths, so both cases are written out
        pattern = "v,bve->be" if weights.ndim == 1 else "bv,bve->be"
        fused = weights[..., :1] * f_cls + torch.einsum(pattern, weights[..., 1:], f_voters)
        centered = self._centered(fused, learned.image_mean, self.token_share)
        return ImageSides(f_cls, self._centered(f_cls, learned.image_mean), centered)

    @torch.no_grad()
    def prepare(self, batches: Batches) -> None:
        """Compute the mean feature of the training images, class directions, and the mean focus term."""
        if self.focus_mean is None and self.image_mean is None:
            return
        stages, labels, units = list[Frozen](), list[Tensor](), list[Tensor]()
        for batch in batches(False):
            stages.append(features_of(self.clip, batch, self.focus))
            labels.append(batch.labels)
            units += [] if batch.units is None else [batch.units]
        images = torch.cat([frozen.x for frozen in stages])  # [n, E]
        if self.image_mean is not None:
            self.image_mean.copy_(unit(images.to(self.image_mean.dtype)).mean(dim=0))
        if self.uses_directions:
            copies = torch.cat(units).numpy() if units else None
            self._fit_directions(unit(images), torch.cat(labels).to(images.device), copies)
        if self.focus_mean is not None:
            terms = torch.cat([frozen.focus for frozen in stages if frozen.focus is not None])  # [n, E]
            self.focus_mean.copy_(terms.mean(dim=0))

    def _fit_directions(self, features: Tensor, labels: Tensor, units: IntArray | None) -> None:
        """Class directions and the initial lambda from unit features [n, E], labels [n] and units [n]."""
        classes, texts = len(self.trained_classes), self.prompts.frozen
        fitted = fit_directions(features, labels, classes, self.config.direction_ridge, units)
        self.direction_rows.copy_(fitted.rows)
        self.direction_inverse = self.direction_rows.new_empty(fitted.inverse.shape).copy_(fitted.inverse)
        self.class_shares.copy_(fitted.shares)
        self.feature_length.copy_(fitted.length)
        self.leaves_out.copy_(fitted.leaves_out)
        weight = initial_weight(
            features,
            labels,
            texts,
            fitted,
            self.config.center,
            self.clip.logit_scale,
            self.config.direction_weight,
        )
        self.log_direction_weight.copy_(weight.log())

    def finish(self) -> None:
        """Empty `direction_inverse`, which only training reads: it would be a third of the saved adapter."""
        if self.uses_directions:
            self.direction_inverse = self.direction_inverse.new_zeros(0, 0)

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """`direction_inverse` of a trained adapter is empty."""
        dropped = (
            self.uses_directions and "direction_inverse" in state and not state["direction_inverse"].numel()
        )
        return {"direction_inverse": (0, 0)} if dropped else {}

    def weights(self, v: Tensor) -> Tensor:
        """Weights of `voters` [..., 1 + V], which sum to 1, from v [..., 1 + A] (eq. 18)."""
        alpha, share = v.softmax(dim=-1), self.config.focus_share
        if not self.focus:
            return alpha
        return torch.cat([(1 - share) * alpha, torch.full_like(alpha[..., :1], share)], dim=-1)

    # -- text tower --------------------------------------------------------------------------------

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
        # text tokens are inserted between BOT and the words (eq. 6)
        edit = Edit(layers, count=len(self.text_tokens), at=self.clip.text.first_word)
        return unit(self.prompts.features(edit, first=self.text_first))

    def class_weights(self, texts: Tensor) -> Tensor:
        """Class weights [C, E]: unit text features, with directions added for trained classes."""
        if not self.uses_directions:
            return texts
        row_of = {name: row for row, name in enumerate(self.trained_classes)}
        rows = [row_of.get(name, 0) for name in self.classes]  # row 0 is a placeholder for new classes
        with_directions = add_directions(texts, self.direction_rows[rows], self.log_direction_weight.exp())
        return torch.where(self.trained_columns()[:, None], with_directions, texts)

    def cached_weights(self) -> Tensor:
        """`class_weights` of the current texts [C, E]."""
        texts = self.cached("texts", self.texts)
        return self.cached("weights", lambda: self.class_weights(texts)) if self.uses_directions else texts

    def encode_classes(self) -> ClassRows:
        """Encode the texts of the classes; no image is needed for it."""
        self.cached_weights()
        return self.class_rows()

    def trained_columns(self) -> Tensor:
        """Whether each class was trained, bool [C]."""
        trained = set(self.trained_classes)
        return torch.tensor([name in trained for name in self.classes], device=self.v.device)

    @cached_property
    def joint(self) -> bool:
        """Whether the classes include both trained ones, which have directions, and new ones."""
        trained = set(self.trained_classes)
        return self.uses_directions and 0 < sum(name in trained for name in self.classes) < len(self.classes)

    # -- logits and loss --------------------------------------------------------------------------

    def class_logits(self, images: Tensor) -> Tensor:
        """Logits [B, C] of centered image features [B, E]."""
        return self.align_scales(self.clip.logit_scale * images @ self.cached_weights().T, images)

    def align_scales(self, logits: Tensor, images: Tensor) -> Tensor:
        """Logits [B, C] with trained and new classes on one scale, for centered image features [B, E].

        Texts alone determine the total probability of the trained classes, as they do for new classes;
        directions determine how it is distributed over the trained classes.
        """
        return logits + self._shift(logits, images) if self.joint else logits

    def _shift(self, logits: Tensor, images: Tensor) -> Tensor:
        """The shift of `align_scales` [B, C]: one value per image for trained classes, 0 for new ones."""
        columns = self.cached("trained_columns", self.trained_columns)
        texts = self.cached("texts", self.texts)
        return align_totals(logits, self.clip.logit_scale * images @ texts.T, columns)

    def _centered(self, features: Tensor, mean: Tensor | None, share: float = 1.0) -> Tensor:
        """Image features [..., E] minus `share * center` times the mean training feature."""
        return features if mean is None else features - share * self.config.center * mean.to(features.dtype)

    @property
    def token_share(self) -> float:
        """The total weight of class token and attributes: 1 minus that of a focus."""
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
        # both towers run concurrently, which saves 8 to 19 % of a recorded step on a GPU
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
        """A function from image features [B, E] to logits [B, C] with leave-one-out directions.

        Directions fitted on an image reveal its class, so that neither tokens nor lambda would learn; each
        image is therefore left out of its directions, represented by the frozen feature of its view. Some
        steps use no directions, so that texts remain comparable with those of new classes, which have none.
        """
        scale = self.clip.logit_scale
        if not self.uses_directions:
            return lambda images: scale * images @ texts.T
        if not self.direction_inverse.numel():  # after training
            weights = self.class_weights(texts)
            return lambda images: scale * images @ weights.T
        assert self.image_mean is not None
        assert frozen.feature is not None
        keep = torch.rand((), device=texts.device) >= self.config.direction_dropout
        log_weight = self.log_direction_weight  # not learned if no image can be left out
        weight = torch.where(self.leaves_out > 0, log_weight, log_weight.detach()).exp() * keep
        x = (frozen.feature.to(self.image_mean.dtype) - self.image_mean) / self.feature_length  # [B, E]
        buffers = (self.direction_rows, self.direction_inverse, self.class_shares, self.feature_length)
        directions = Directions(*buffers, self.leaves_out)
        products = compare_without_image(x, labels, texts, directions, weight)
        return lambda images: scale * products(images)

    # -- features, votes and fusion weights --------------------------------------------------------

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Unnormalized features of the class token [B, E] and of the attributes [B, A, E]."""
        f_cls, f_voters = self._voter_features(pixels)
        return f_cls[:, 0], f_voters[:, : len(self.attributes)]

    def _voter_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the class token [B, 1, E] and of the other voters [B, V, E] of pixels [B, 3, S, S]."""
        frozen = self.inference_stage(pixels.to(self.clip.device))
        return self.voter_features(frozen, self.learned, self.clip.visual.correction)

    def attribute_features(self, pixels: Tensor) -> Tensor:
        """Unnormalized features of the attributes, [B, A, E]."""
        return self.image_features(pixels)[1]

    @torch.no_grad()
    def votes(self, pixels: Tensor) -> Tensor:
        """The contribution of each of `voters` to the fused logits, [B, 1 + V, C]."""
        f_cls, f_voters = self._voter_features(pixels)
        features = unit(torch.cat([f_cls.to(f_voters.dtype), f_voters], dim=1))  # [B, 1 + V, E]
        # [B, 1 + A, E] and [B, 0 or 1, E]
        tokens, focus = features.tensor_split([1 + len(self.attributes)], dim=1)
        features = torch.cat([self._centered(tokens, self.image_mean), focus], dim=1)
        shares = self.weights(self.v)[:, None]  # [1 + V, 1]
        votes = self.clip.logit_scale * shares * (features @ self.cached_weights().T)
        if self.joint:  # divide the shift of `align_scales` among the voters
            fused = (shares * features).sum(dim=1)  # [B, E]
            votes = votes + shares * self._shift(votes.sum(dim=1), fused)[:, None]
        return votes

    def attribute_index(self, name: str) -> int:
        """Index of an attribute in `attribute_features`; case does not matter."""
        return self.attributes.index(find_attribute(name, self.attributes))

    def fusion_weights(self) -> dict[str, float]:
        """The weight of each of `voters` (alpha, without a focus); they sum to 1."""
        return dict(zip(self.voters, self.weights(self.v.detach().double()).tolist(), strict=True))

    def learned_values(self) -> dict[str, Any]:
        """The fusion weights, and the weight of class directions relative to texts."""
        facts: dict[str, Any] = {"fusion_weights": self.fusion_weights()}
        if self.uses_directions:
            facts["direction_weight"] = float(self.log_direction_weight.detach().double().exp())
        return facts
