"""Options and presets of DeAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from dear.errors import UsageError
from dear.heads.concept_words import find_attribute
from dear.heads.names import CONCEPTS
from dear.methods.options import NotNegative, Options, Positive, Preset, Ridge, Share

# The upper bound rejects damaged files, which may contain any number.
TokenCount = Annotated[int, Meta(ge=0, le=1024)]


@dataclass(frozen=True)
class DeARConfig(Options):
    """Options of DeAR; the defaults are the preset `strong`, the paper's values `DeAR.preset("paper")`."""

    attributes: tuple[str, ...] | None = None  #: attributes with tokens; None: the role map's core concepts
    #: J, where tokens enter; None: the first of the last third (9 of 12). Text tokens enter there as well, or
    #: at the last third of a text tower of another depth
    first_layer: int | None = None
    text_tokens: TokenCount = 5  #: K
    #: "class": raw tokens are the image's class token plus learned vectors; "free": learned vectors alone
    token_start: Literal["class", "free"] = "class"
    beta: Share = 0.1  #: weight of the raw token relative to the previous layer's output (eq. 5)
    #: free tokens in every layer after the first sixth (from 3 of 12) to J - 1, a set per layer
    early_tokens: TokenCount = 5
    text_beta: Share | None = 0.9  #: beta of the text tokens (eq. 6); None: beta
    #: "readonly": in isolated heads, attribute tokens may attend to the original tokens
    isolation: Literal["bidirectional", "readonly"] = "bidirectional"
    lambda_reg: NotNegative = 1.0  #: weight of L_img + L_txt
    lambda_fusion: NotNegative = 0.02  #: weight of L_fusion
    class_ce: Share = 0.3  #: c: (1 - c) CE(fused logits) + c CE(decoupled logits)
    token_rate: Positive = 20.0  #: learning rate of the attribute tokens, as a multiple of the recipe's
    early_rate: Positive = 20.0  #: learning rate of the early tokens, likewise
    text_rate: Positive = 3.0  #: learning rate of the text tokens, likewise
    projection_rate: Positive = 0.5  #: learning rate of P_attr, likewise
    alpha_rate: Positive = 100.0  #: learning rate of v, whose softmax is alpha, likewise
    #: fraction of the mean training feature that is subtracted from image features before the cosine
    center: Share = 1.0
    #: "ridge": add directions from training images, by ridge regression, to the texts of trained classes
    directions: Literal["ridge", "none"] = "ridge"
    direction_ridge: Ridge = 4.0  #: in units of a squared image feature; large: directions to class means
    #: with one image per class, lambda (the weight of a direction relative to a unit text feature) is this
    #: times the error of frozen texts on the training images; with more, it is initialized by leave-one-out
    direction_weight: Positive = 0.4
    direction_dropout: Share = 0.5  #: fraction of the training steps without directions
    focus: tuple[tuple[int, int], ...] = ()  #: (layer, head) pairs whose frozen contribution also votes
    focus_share: Share = 0.2  #: s: logits are (1 - s) fused + s those of the heads of the focus

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attributes is not None:
            names = tuple(_canonical_concept(name) for name in self.attributes)
            if not names:
                raise UsageError("attributes must contain at least one name, got none")
            if len({name.casefold() for name in names}) < len(names):
                raise UsageError(f"attributes must differ from each other, got {', '.join(names)}")
            object.__setattr__(self, "attributes", names)


def _canonical_concept(name: str) -> str:
    """A concept in the paper's spelling; other names are kept, because a role map may contain them."""
    try:
        return find_attribute(name, CONCEPTS)
    except UsageError:
        return name


PRESETS = {
    "strong": Preset("free early tokens adapt the class token, from which the attribute tokens start"),
    "quick": Preset(
        "attribute tokens that start from the class token, no early tokens: 0.6 of the time of strong",
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
