"""The words of the paper: kinds of role, the twelve concepts and which of them are core."""

from __future__ import annotations

Head = tuple[int, int]  #: (layer counted from 1, head counted from 0)

KINDS: tuple[str, ...] = ("core", "other", "generalization", "mixed")
"""What a head may be; the order in which tables and legends show them."""

KIND_TITLES: dict[str, str] = {
    "core": "Core Attribute",
    "other": "Other Specialized",
    "generalization": "Generalization",
    "mixed": "Mixed",
}

CORE: tuple[str, ...] = ("Color", "Shape", "Texture", "Object", "Location")
"""The five concepts that get an attribute token (main text, section 3.2)."""

CONCEPTS: tuple[str, ...] = (
    "Location", "Object", "Color", "Shape", "Texture", "Animal", "Human", "Text", "Number", "Style",
    "Emotion", "Action",
)  # fmt: skip
"""The twelve concepts of the supplement, section B, in its order."""

GENERAL: str = "Style"
"""The concept whose heads are Generalization heads (supplement, section B)."""

PROTOTYPES: dict[str, tuple[str, ...]] = {
    "Location": (
        "a photo taken in a city or a country",
        "a landscape",
        "a place",
        "the inside of a building",
    ),
    "Object": ("an object", "a tool or a household thing", "a piece of clothing", "a vehicle"),
    "Color": ("a color", "an image with red and blue tones", "a palette of bright colors"),
    "Shape": ("a geometric shape", "a triangle or a circle", "something with a round outline"),
    "Texture": ("a texture", "a rough surface", "a striped pattern", "close-up of a woven material"),
    "Animal": ("an animal", "a photo of a dog or a bird", "a wild creature"),
    "Human": ("a person", "a group of people", "a man, a woman or a child"),
    "Text": ("a letter", "written words", "a sign with text on it"),
    "Number": ("a number", "the number seven", "an image with three things"),
    "Style": ("an artistic style", "a painting or a sketch", "the composition of a photograph"),
    "Emotion": ("an emotion", "a sad or joyful mood", "a facial expression"),
    "Action": ("an action", "somebody running or jumping", "a sport"),
}
"""Sentences that represent a concept when clusters have no tags to name them, or when concepts are fixed."""
