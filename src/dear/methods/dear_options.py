"""DeAR's options and its two presets: the paper's values, and those chosen on development datasets."""

from __future__ import annotations

from dataclasses import dataclass

from dear.errors import UsageError
from dear.heads.names import CONCEPTS
from dear.methods.masks import ISOLATIONS
from dear.methods.options import added
from dear.methods.presets import Preset

TOKEN_STARTS = ("free", "class")
NOVEL_MODES = ("decoupled", "fused", "blend")
PROJECTIONS = ("copy", "random", "low-rank")
FUSION_LOSSES = ("log", "linear")
_SPELLINGS = {**{concept.casefold(): concept for concept in CONCEPTS}, "colour": "Color"}
_MOST = 1024  # more tokens or ranks than anyone means; a damaged file may name any number


@dataclass(frozen=True)
class DeARConfig:
    """Options of DeAR; the defaults are the paper's."""

    attributes: tuple[str, ...] | None = None  #: those with tokens; None: the role map's core concepts
    tokens_per_attribute: int = 1  #: an attribute's feature is the mean of its tokens' features
    tokens_per_layer: bool = False  #: a raw set of tokens per layer instead of one for all layers
    first_layer: int | None = None  #: J, where tokens enter; None: the last third begins (9 of 12)
    text_first_layer: int | None = None  #: the same for text; None: J if as deep, else its last third
    text_tokens: int = 5  #: K
    token_start: str = added("free")  #: "class": the image's class token plus what is learned
    beta: float = 0.9  #: weight of the raw token against the layer before (eq. 5)
    text_beta: float | None = added(None)  #: the same for text tokens (eq. 6); None: beta
    isolation: str = "bidirectional"  #: or "readonly": attribute tokens may read the originals
    projection: str = "copy"  #: start of P_attr: "copy" of P_v, "random", or "low-rank" beside frozen P_v
    rank: int = 16  #: of the low-rank projection
    fusion_loss: str = "log"  #: "log": -log alpha_cls; "linear": 1 - alpha_cls
    lambda_reg: float = 1.0  #: weight of L_img + L_txt
    lambda_fusion: float = 0.7  #: weight of L_fusion
    class_ce: float = added(0.0)  #: c: (1 - c) CE(fused logits) + c CE(decoupled logits)
    alpha_start: float | None = added(None)  #: alpha_cls before training; None: the same for all, 1 / (1 + A)
    token_rate: float = added(1.0)  #: learning rate of the attribute tokens, as a multiple of the recipe's
    text_rate: float = added(1.0)  #: the same for the text tokens
    novel_mode: str = added("decoupled")  #: of "auto" for new classes; or "fused", "blend"
    blend: float = added(0.3)  #: weight of the frozen image feature in "blend", beside 1 for the fused one

    def __post_init__(self) -> None:
        def demand(good: bool, message: str) -> None:
            if not good:
                raise UsageError(message)

        if self.attributes is not None:
            names = tuple(_concept(name) for name in self.attributes)
            demand(bool(names), "attributes is empty: DeAR needs at least one")
            demand(len({n.casefold() for n in names}) == len(names), f"attributes {names} name one twice")
            object.__setattr__(self, "attributes", names)
        demand(1 <= self.tokens_per_attribute <= _MOST, f"tokens_per_attribute must be from 1 to {_MOST}")
        demand(0 <= self.text_tokens <= _MOST, f"text_tokens must be from 0 to {_MOST}")
        for name in ("beta", "text_beta", "class_ce"):
            value = getattr(self, name)
            demand(value is None or 0.0 <= value <= 1.0, f"{name} = {value} is not between 0 and 1")
        demand(self.blend >= 0, f"blend = {self.blend} cannot be negative")
        alpha = self.alpha_start
        demand(alpha is None or 0.0 < alpha < 1.0, f"alpha_start = {alpha} must be above 0 and below 1")
        demand(min(self.token_rate, self.text_rate) > 0, "token_rate and text_rate must be above 0")
        demand(1 <= self.rank <= _MOST, f"rank must be from 1 to {_MOST}")
        demand(
            self.lambda_reg >= 0 and self.lambda_fusion >= 0,
            "lambda_reg and lambda_fusion cannot be negative",
        )
        for name, value, known in (
            ("token_start", self.token_start, TOKEN_STARTS),
            ("novel_mode", self.novel_mode, NOVEL_MODES),
            ("isolation", self.isolation, ISOLATIONS),
            ("projection", self.projection, PROJECTIONS),
            ("fusion_loss", self.fusion_loss, FUSION_LOSSES),
        ):
            demand(value in known, f"{name} {value!r} is not known; choose from {', '.join(known)}")


PRESETS = {
    "strong": Preset(
        "tokens that start from the image's class token; chosen on four development datasets",
        options={
            "token_start": "class",
            "beta": 0.2,
            "text_beta": 0.9,
            "class_ce": 0.7,
            "token_rate": 5.0,
            "text_rate": 3.0,
            "novel_mode": "blend",
        },
        recipe={"batch": 4},
    ),
    "paper": Preset("every value of the paper and its supplement"),
}


def _concept(name: str) -> str:
    """A concept as the paper spells it; other names stay, for a role map may know them."""
    return _SPELLINGS.get(name.strip().casefold(), name)
