"""The vocabulary of the attribute world: what a scene can be made of, and the words for it.

Every value of a factor has a canonical word first and synonyms after it. The order of values is part of the
world: a scene stores positions in these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Words = tuple[str, ...]

FACTORS: Final = ("kind", "subject", "color", "texture", "place", "count", "style")
KIND, SUBJECT, COLOR, TEXTURE, PLACE, COUNT, STYLE = range(len(FACTORS))


@dataclass(frozen=True)
class Color:
    """A named color: its body tone and the two tones a pattern may be drawn in upon it (RGB in 0..1)."""

    words: Words
    rgb: tuple[float, float, float]
    marks: tuple[tuple[float, float, float], tuple[float, float, float]]


@dataclass(frozen=True)
class Kind:
    """A family of subjects, and how often pretraining draws it."""

    name: str
    words: Words
    share: float
    textured: float  # chance that a subject of this kind carries a pattern
    multiple: float  # chance that there is more than one of it


COLORS: Final = (
    Color(("red", "crimson", "scarlet"), (0.86, 0.11, 0.12), ((0.46, 0.02, 0.04), (1.0, 0.66, 0.62))),
    Color(("orange", "tangerine"), (0.97, 0.50, 0.05), ((0.62, 0.26, 0.0), (1.0, 0.82, 0.52))),
    Color(("yellow", "golden"), (0.98, 0.87, 0.12), ((0.70, 0.54, 0.0), (0.84, 0.68, 0.02))),
    Color(("green", "emerald"), (0.16, 0.62, 0.18), ((0.03, 0.30, 0.06), (0.64, 0.92, 0.56))),
    Color(("teal", "turquoise"), (0.03, 0.62, 0.62), ((0.0, 0.30, 0.32), (0.62, 0.94, 0.92))),
    Color(("blue", "azure"), (0.13, 0.28, 0.86), ((0.03, 0.08, 0.42), (0.60, 0.74, 1.0))),
    Color(("purple", "violet"), (0.50, 0.17, 0.66), ((0.24, 0.04, 0.34), (0.82, 0.64, 0.94))),
    Color(("pink", "rose"), (0.98, 0.54, 0.72), ((0.78, 0.20, 0.46), (0.88, 0.32, 0.56))),
    Color(("brown", "chestnut"), (0.47, 0.28, 0.13), ((0.22, 0.11, 0.03), (0.78, 0.60, 0.42))),
    Color(("black", "jet black"), (0.08, 0.08, 0.09), ((0.46, 0.46, 0.47), (0.38, 0.38, 0.40))),
    Color(("white", "snow white"), (0.97, 0.97, 0.97), ((0.64, 0.64, 0.66), (0.72, 0.72, 0.73))),
    Color(("gray", "grey"), (0.52, 0.52, 0.54), ((0.25, 0.25, 0.27), (0.78, 0.78, 0.80))),
)

TEXTURES: Final[tuple[Words, ...]] = (
    ("plain", "smooth", "solid"), ("striped", "banded"), ("dotted", "polka dotted", "spotted"),
    ("checkered", "checked"), ("wavy", "rippled"), ("zigzag", "chevron"), ("brick", "bricked"),
    ("grid", "meshed"), ("speckled", "flecked"), ("scaly", "scaled"), ("honeycomb", "hexagonal"),
    ("marbled", "veined"),
)  # fmt: skip
PLAIN: Final = 0

# A place is named by a phrase after the subject ("at the beach") and by its bare name ("beach").
PLACES: Final[tuple[tuple[Words, Words], ...]] = (
    (("in a studio", "on a plain background", "on a plain backdrop"), ("studio", "plain background")),
    (("at the beach", "at the seaside", "on the sand"), ("beach", "seaside")),
    (("in the forest", "in the woods", "among the trees"), ("forest", "woods")),
    (("in the desert", "among the dunes"), ("desert", "dunes")),
    (("in the snow", "on a snowy day"), ("snow", "snowy field")),
    (("in the city", "downtown"), ("city", "skyline")),
    (("in a room", "indoors", "inside a house"), ("room", "living room")),
    (("on the ocean", "on the sea", "at sea"), ("ocean", "sea")),
    (("in space", "in outer space", "among the stars"), ("space", "outer space")),
    (("in the mountains", "near the peaks"), ("mountains", "peaks")),
    (("in a meadow", "on the grass", "in a field"), ("meadow", "grassy field")),
    (("on the road", "on a highway"), ("road", "highway")),
)

# A style is named before the subject ("a sketch of") and by its bare name ("sketch").
STYLES: Final[tuple[tuple[Words, Words], ...]] = (
    (("a photo of", "a photograph of"), ("photo", "photograph")),
    (("a sketch of", "a pencil drawing of"), ("sketch", "pencil drawing")),
    (("a cartoon of", "a comic of"), ("cartoon", "comic")),
    (("a painting of", "an oil painting of"), ("painting", "oil painting")),
    (("a pixelated image of", "pixel art of"), ("pixelated image", "pixel art")),
    (("a blurry image of", "a blurred photo of"), ("blurry image", "blurred photo")),
    (("a sepia image of", "a sepia photo of"), ("sepia image", "sepia photo")),
    (("a neon sign of", "a neon image of"), ("neon sign", "neon image")),
)
PHOTO, SKETCH, CARTOON, PAINTING, PIXELATED, BLURRY, SEPIA, NEON = range(8)
COLORLESS_STYLES: Final = (SKETCH, SEPIA, NEON)  # the subject's color cannot be seen: it is never named
COARSE_STYLES: Final = (PIXELATED, BLURRY)  # fine patterns cannot be seen: subjects stay plain

COUNTS: Final[tuple[Words, ...]] = (
    ("one", "a single"), ("two", "a pair of"), ("three",), ("four",), ("five",)
)  # fmt: skip

KINDS: Final = (
    Kind("shape", ("shape", "figure"), 0.36, 0.80, 0.25),
    Kind("object", ("object", "item"), 0.13, 0.50, 0.20),
    Kind("vehicle", ("vehicle",), 0.12, 0.40, 0.15),
    Kind("animal", ("animal", "creature"), 0.12, 0.45, 0.20),
    Kind("person", ("person", "human"), 0.05, 0.0, 0.0),
    Kind("face", ("face",), 0.05, 0.0, 0.0),
    Kind("letter", ("letter",), 0.06, 0.0, 0.0),
    Kind("digit", ("digit", "number"), 0.04, 0.0, 0.0),
    Kind("surface", ("surface", "material"), 0.05, 0.97, 0.0),
    Kind("view", ("landscape", "view"), 0.02, 0.0, 0.0),
)
SHAPE, OBJECT, VEHICLE, ANIMAL, PERSON, FACE, LETTER, DIGIT, SURFACE, VIEW = range(10)

SHAPES: Final = (
    "circle", "square", "triangle", "star", "heart", "diamond", "cross", "crescent", "ring", "arrow",
    "hexagon", "bolt",
)  # fmt: skip
OBJECTS: Final = (
    "house", "tree", "cup", "umbrella", "chair", "lamp", "bottle", "hat", "flower", "key", "mushroom",
    "clock",
)  # fmt: skip
VEHICLES: Final = (
    "car", "truck", "bus", "van", "tractor", "ship", "sailboat", "plane", "train", "bicycle", "helicopter",
    "rocket",
)  # fmt: skip
ANIMALS: Final = (
    "dog", "cat", "bird", "fish", "rabbit", "horse", "elephant", "snake", "turtle", "butterfly", "duck",
    "snail",
)  # fmt: skip
ACTIONS: Final = ("standing", "running", "jumping", "sitting", "waving", "dancing")
EMOTIONS: Final = ("happy", "sad", "angry", "surprised", "sleepy", "calm")
LETTERS: Final = tuple("abcdefghijklmnopqrstuvwxyz")
DIGITS: Final = tuple("0123456789")

# The subject table: one row a drawable thing, in the order of kinds.
_OF_KIND: Final = (
    SHAPES, OBJECTS, VEHICLES, ANIMALS, ACTIONS, EMOTIONS, LETTERS, DIGITS, ("surface",), ("view",)
)  # fmt: skip
SUBJECT_NAMES: Final = tuple(name for names in _OF_KIND for name in names)
KIND_SIZES: Final = tuple(len(names) for names in _OF_KIND)
KIND_FIRST: Final = tuple(sum(KIND_SIZES[:kind]) for kind in range(len(KIND_SIZES)))
SUBJECT_KIND: Final = tuple(kind for kind, size in enumerate(KIND_SIZES) for _ in range(size))

SYNONYMS: Final[dict[str, Words]] = {
    "circle": ("disc",), "square": ("block",), "diamond": ("rhombus",), "cross": ("plus sign",),
    "crescent": ("half moon",), "ring": ("hoop",), "bolt": ("lightning bolt",), "house": ("cottage", "home"),
    "cup": ("mug",), "umbrella": ("parasol",), "lamp": ("desk lamp",), "hat": ("top hat",),
    "flower": ("blossom",), "mushroom": ("toadstool",), "clock": ("alarm clock",), "car": ("automobile",),
    "truck": ("lorry",), "bus": ("coach",), "van": ("minivan",), "ship": ("boat",), "sailboat": ("yacht",),
    "plane": ("airplane", "aircraft"), "train": ("locomotive",), "bicycle": ("bike",),
    "helicopter": ("chopper",), "rocket": ("spaceship",), "dog": ("puppy",), "cat": ("kitten",),
    "rabbit": ("bunny",), "horse": ("pony",), "turtle": ("tortoise",),
}  # fmt: skip
_PLURALS: Final = {"cross": "crosses", "bus": "buses", "fish": "fish", "butterfly": "butterflies"}


def plural(word: str) -> str:
    """The plural of a noun of this world: `plural("bus")` is `"buses"`."""
    return _PLURALS.get(word, word + "s")


_NAMES: Final[dict[str, tuple[Words, ...]]] = {
    "subject": tuple((name,) for name in SUBJECT_NAMES),
    "color": tuple(color.words for color in COLORS),
    "texture": TEXTURES,
    "place": tuple(names for _, names in PLACES),
    "style": tuple(names for _, names in STYLES),
}


def row(factor: str, name: str) -> int:
    """The row of a value in its factor's table; subjects by canonical name, places and styles by bare name.

    >>> SUBJECT_KIND[row("subject", "star")] == SHAPE
    True
    """
    return next(i for i, names in enumerate(_NAMES[factor]) if name in names)
