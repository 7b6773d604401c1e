"""How much the demo does, in full and in its quick form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How much the demo does.

    Attributes:
        tasks: tasks to adapt to.
        epochs: of training; None: the recipe's.
        views: random views per training image.
        test_images: of each class; None: all.
        role_images: images that roles are discovered on.
        known_images: images whose attributes are known, for the truth about heads and for retrieval.
        per_group: test images per class and place of the shortcut.
    """

    tasks: tuple[str, ...] = ("textures", "emblems")
    epochs: int | None = None
    views: int = 4
    test_images: int | None = None
    role_images: int = 2500
    known_images: int = 800
    per_group: int = 20


QUICK = Size(("textures",), 2, 1, 10, role_images=400, known_images=120, per_group=2)
