"""Variants of `strong` that `grid.py` trains as `dear[variant=NAME]`; classes and options, no command.

`strong` runs layers 3 to 8 twice: once frozen, for the class token that attribute tokens start from, and
once with early tokens. `RULES.md` has the rules, `README.md` what came out. Below, "class row" is a second
class token: it reads patches, itself and the early tokens, nothing reads it, and it takes the place of the
class token at layer J. Where only the class row reads the early tokens, class token and patches stay frozen,
so that one pass computes both.

- `class`: class row in layers 3 to 8, one pass.
- `m6`, `m7`, `m8`: class row before that layer; from there on everything reads the early tokens, and only
  these layers have a second, frozen pass.
- `late`: `class`, and in layers J to 12 five more free tokens that class token and patches read.
- `late-only`: the late tokens alone.
- `m7-late`, `m8-late`: both.
- `plain`: one pass in which everything reads the early tokens; a second class token reads patches and itself
  alone, nothing reads it, and attribute tokens start from it. `pulled`: with a loss that pulls it toward the
  frozen class token.
- `m6-plain`, `m7-plain`: class row before that layer, `plain` from there on.
- `start5`, `start6`: attribute tokens start from the frozen class token at the input of layer 5 or 6.
- `drift5`, `drift6`: they start from the adapted class token less its change by the input of that layer.

Variants whose frozen pass has fewer patches, in training and in answers:

- `progressive`: every second patch in the first half of these layers, every fourth one in the others.
- `quarter`: means of 2 x 2 patches, each read with the weight of four.
- `halves`: means of two neighbors in the first half of these layers, of 2 x 2 in the others, likewise.

With one image per class, `texts`: training uses texts alone and answers use directions, because directions
reveal the class of an image that cannot be left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dear.clip.edit import BlockMask, Edit, LayerEdit
from dear.clip.model import Clip
from dear.methods.dear import DeAR, Learned
from dear.methods.frozen import Frozen, Loss
from dear.methods.tensors import normal

FIVE = 5  #: late tokens


class Split(DeAR):
    """DeAR whose early tokens reach the class row alone before layer `shared`, everything from it on."""

    shared = 9
    late = 0  #: free tokens in layers J to the last
    plain = False  #: whether the second class token of layers `shared` to 8 replaces the frozen pass
    pull = 0.0  #: weight of its distance to the frozen class token

    def build(self, generator: torch.Generator) -> None:
        """Adds late tokens."""
        super().build(generator)
        self.hidden: dict[tuple[str, int, int], Tensor] = {}
        self.distance: Tensor | None = None
        if self.late:
            vision = self.clip.config.vision
            shape = (vision.layers - self.entry + 1, self.late, vision.width)
            self.late_tokens = self.learn(normal(generator, *shape), self.config.early_rate)
            self.late_masks = {layer: self._late_mask(mask) for layer, mask in self.masks.items()}

    def _late_mask(self, mask: BlockMask) -> BlockMask:
        """A mask of layers J to the last; originals read the late tokens, attribute tokens do not."""
        heads, blocks = mask.visible.shape[:2]
        see = torch.zeros(heads, blocks + self.late, blocks + self.late, dtype=torch.bool)
        see[:, :blocks, :blocks] = mask.visible
        see[:, 0, blocks:] = see[:, blocks:, :] = True
        return BlockMask(see)

    def _mask(self, kind: str, originals: int, x: Tensor) -> Tensor:
        """The additive mask of originals, a second class token, and early tokens, [1, N, N]."""
        total = originals + 1 + self.config.early_tokens
        key = (kind, originals, total)
        if key not in self.hidden:
            see = torch.ones(total, total, dtype=torch.bool)
            if kind == "class":
                see[:originals, originals:] = False
                see[originals, 0] = False
            else:
                see[:, originals] = False
                see[originals] = False
                see[originals, 1 : originals + 1] = True
            full = torch.zeros(1, total, total).masked_fill(~see, -math.inf)
            self.hidden[key] = full.to(x.device)
        return self.hidden[key]

    def _second_row(self, kind: str, x: Tensor, row: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Layers `first` to `last` with early tokens and a second class token [B, 1, D]."""
        count = x.shape[1]
        for layer in range(first, last + 1):
            tokens = self.early_tokens[layer - self.first].to(row.dtype).expand(len(x), -1, -1)
            tokens = torch.cat([row, tokens], dim=1)
            edit = Edit(
                {layer: LayerEdit(tokens=tokens, mask=self._mask(kind, count, x))}, count=tokens.shape[1]
            )
            whole = self.clip.visual.run(x, layer, layer, edit)
            x, row = whole[:, :count], whole[:, count : count + 1]
        return x, row

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """As in DeAR."""
        visual, x, start = self.clip.visual, frozen.x, frozen.class_token
        if self.config.early_tokens:
            shared = min(self.shared, self.entry)
            token = x[:, :1]
            x, row = self._second_row("class", x, token, self.first, shared - 1)
            token = x[:, :1]
            x = torch.cat([row, x[:, 1:]], dim=1)
            if self.plain:
                x, start = self._second_row("plain", x, token, shared, self.entry - 1)
                if self.pull and torch.is_grad_enabled():
                    change = (start - frozen.class_token).float().square().mean()
                    self.distance = change / frozen.class_token.float().square().mean()
            elif shared < self.entry:
                layers = {
                    layer: LayerEdit(tokens=self.early_tokens[layer - self.first])
                    for layer in range(shared, self.entry)
                }
                edit = Edit(layers, count=self.config.early_tokens)
                x = visual.run(x, shared, self.entry - 1, edit)[:, : x.shape[1]]
        if start is None:
            start = x[:, :1]
        return self._finish(x, start.detach(), learned)

    def _finish(self, x: Tensor, start: Tensor, learned: Learned) -> tuple[Tensor, Tensor]:
        """Layers J to the last."""
        visual, edit = self.clip.visual, self.attribute_edit(learned.tokens, start)
        if not self.late:
            return visual.class_and_tokens(x, self.entry, edit)
        count, attributes, last = x.shape[1], len(self.attributes), max(self.masks)
        raw = self._raw_tokens(learned.tokens, start).to(x.dtype).expand(len(x), -1, -1)
        tokens = raw
        for layer, late in enumerate(self.late_tokens, self.entry):
            if layer > self.entry:
                tokens = self.config.beta * raw + (1 - self.config.beta) * tokens
            extra = torch.cat([tokens, late.to(x.dtype).expand(len(x), -1, -1)], dim=1)
            change = LayerEdit(tokens=extra, mask=self.late_masks[layer])
            edit = Edit({layer: change}, count=extra.shape[1])
            if layer == last:
                break
            whole = visual.run(x, layer, layer, edit)
            x, tokens = whole[:, :count], whole[:, count : count + attributes]
        x_cls, pooled = visual.class_and_tokens(x, last, edit)
        return x_cls, pooled[:, :attributes]

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """As in DeAR, with the distance to the frozen class token."""
        loss = super().loss_from_frozen(frozen, labels, domains)
        if not self.pull:
            return loss
        distance, self.distance = self.distance, None  # a graph that is kept spoils the recording of a step
        assert distance is not None
        return Loss(loss.total + self.pull * distance, loss.parts)


class EarlyStart(DeAR):
    """DeAR whose attribute tokens start from the frozen class token of an earlier layer."""

    at = 5
    drift = False  #: start from the adapted class token less its change by that layer

    def build(self, generator: torch.Generator) -> None:
        """As in DeAR."""
        super().build(generator)
        self.class_token_at = self.at

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """As in DeAR."""
        if not self.drift:
            return super().pooled(frozen, learned)
        visual, x, layers = self.clip.visual, frozen.x, self.at - self.first
        count = x.shape[1]
        x = visual.run(x, self.first, self.at - 1, self.early_edit(learned.early_tokens[:layers]))[:, :count]
        start = frozen.class_token - x[:, :1]
        edit = {
            layer: LayerEdit(tokens=tokens)
            for layer, tokens in enumerate(learned.early_tokens[layers:], self.at)
        }
        x = visual.run(x, self.at, self.entry - 1, Edit(edit, count=self.config.early_tokens))[:, :count]
        edit = self.attribute_edit(learned.tokens, (start + x[:, :1]).detach())
        return visual.class_and_tokens(x, self.entry, edit)


class Thinned(DeAR):
    """DeAR whose frozen class token at layer J is computed from fewer patches."""

    stages: tuple[str, ...] = ()  #: what becomes of the patches before each equal part of the layers

    def inference_stage(self, pixels: Tensor, feature_of: Clip | None = None) -> Frozen:
        """As in DeAR, with another class token."""
        stage = super().inference_stage(pixels, feature_of)
        visual, x, first, size = self.clip.visual, stage.x, self.first, 1
        side = math.isqrt(x.shape[1] - 1)
        row, column = (torch.arange(side * side) // side, torch.arange(side * side) % side)
        places = torch.arange(side * side)
        with torch.no_grad():
            for number, kind in enumerate(self.stages, 1):
                last = self.first + (self.entry - self.first) * number // len(self.stages) - 1
                if kind in ("board", "rows"):
                    wanted = ((row + column) % 2 == 0) if kind == "board" else row % 2 == 0
                    kept = wanted[places].to(x.device)
                    x, places = torch.cat([x[:, :1], x[:, 1:][:, kept]], dim=1), places[wanted[places]]
                else:
                    x, size = (
                        _merged(x, side, size, kind),
                        size * {"pairs": 2, "squares": 4, "again": 2}[kind],
                    )
                edit = None
                if size > 1:
                    weights = torch.full((1, x.shape[1], x.shape[1]), math.log(size), device=x.device)
                    weights[:, :, 0] = 0
                    edit = Edit({layer: LayerEdit(mask=weights) for layer in range(first, last + 1)})
                x, first = visual.run(x, first, last, edit), last + 1
        return stage._replace(class_token=x[:, :1])


def _merged(x: Tensor, side: int, size: int, kind: str) -> Tensor:
    """Means of neighboring patches: "pairs" and "squares" of single ones, "again" pairs of pairs."""
    columns = side if size == 1 else side // 2
    grid = x[:, 1:].unflatten(1, (side, columns))  # [B, rows, columns, D]
    if kind != "again":  # of neighbors in a row
        grid = grid.unflatten(2, (-1, 2)).mean(dim=3)
    if kind != "pairs":  # of neighbors in a column
        grid = grid.unflatten(1, (-1, 2)).mean(dim=2)
    return torch.cat([x[:, :1], grid.flatten(1, 2)], dim=1)


class TextsAtOne(DeAR):
    """DeAR that trains without directions; for one image per class."""

    def _training_logits(self, texts: Tensor, frozen: Frozen, labels: Tensor) -> Any:
        if self.direction_inverse.numel():  # training
            return lambda images: self.clip.logit_scale * images @ texts.T
        return super()._training_logits(texts, frozen, labels)


def split(shared: int = 9, **values: Any) -> type[DeAR]:
    """`Split` with these values."""
    return type("Split", (Split,), {"shared": shared, **values})


def thinned(*stages: str) -> type[DeAR]:
    """`Thinned` with these stages."""
    return type("Thinned", (Thinned,), {"stages": stages})


#: class and options of each variant
VARIANTS: dict[str, tuple[type[DeAR], dict[str, Any]]] = {
    "class": (split(), {}),
    "class20": (split(), {"early_tokens": 20}),
    "class60": (split(), {"early_rate": 60.0}),
    "late": (split(late=FIVE), {}),
    "late10": (split(late=10), {}),
    "late-only": (split(late=FIVE), {"early_tokens": 0}),
    "m6": (split(6), {}),
    "m7": (split(7), {}),
    "m8": (split(8), {}),
    "m7-10": (split(7), {"early_tokens": 10}),
    "m7-late": (split(7, late=FIVE), {}),
    "m8-late": (split(8, late=FIVE), {}),
    "plain": (split(3, plain=True), {}),
    "pulled": (split(3, plain=True, pull=10.0), {}),
    "m6-plain": (split(6, plain=True), {}),
    "m7-plain": (split(7, plain=True), {}),
    "start5": (type("EarlyStart5", (EarlyStart,), {"at": 5}), {}),
    "start6": (type("EarlyStart6", (EarlyStart,), {"at": 6}), {}),
    "drift5": (type("Drift5", (EarlyStart,), {"at": 5, "drift": True}), {}),
    "drift6": (type("Drift6", (EarlyStart,), {"at": 6, "drift": True}), {}),
    "progressive": (thinned("board", "rows"), {}),
    "quarter": (thinned("squares"), {}),
    "halves": (thinned("pairs", "again"), {}),
    "texts": (TextsAtOne, {}),
}
