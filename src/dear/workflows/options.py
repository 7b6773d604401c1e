"""Options of an adaptation: one frozen dataclass, shared by the functions and classes that train."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dear._io.files import PathLike
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.roles import RoleMap


@dataclass(frozen=True)
class AdaptOptions:
    """How a backbone is adapted.

    Attributes:
        method: name of the method; see `dear.list_methods()`.
        backbone: what `dear.load` takes, or a loaded backbone.
        roles: role map or its file, for methods that use roles; None: the backbone's own.
        allow_other_roles: accept a role map that was computed on other weights.
        shots: images per class to train on; None or 0: all.
        seed: of the draw, of the initial values, of the order and of the views.
        template: prompt with `{}` for the class; None: the dataset's.
        root: folder of the benchmarks, for the name of a benchmark.
        device: "auto", "cpu", "cuda", ...
        recipe: changes to the method's recipe (epochs, batch, lr, precision, ...), or the name of a preset.
        preset: name of a setting of the method ("strong", "paper"); None: the one it recommends.
        options: the method's own options by name.
        balance: repeat images of rare classes, so that every class counts alike.
        unreadable: "stop" refuses a set with images that cannot be read, "skip" leaves those out.
        mode: how the result will predict; checked before training.
        without: concepts to remove before training ("location", "location,color"), or a
            `dear.heads.without.Without`.
        examples: images that show the values of the only concept to remove, one folder per value.
        calibrate: fit probabilities and the threshold for "none of these" by cross-validation after training,
            which takes about one and a half further trainings.
    """

    method: str = "dear"
    backbone: PathLike | Clip = "mini"
    roles: PathLike | RoleMap | None = None
    allow_other_roles: bool = False
    shots: int | None = None
    seed: int = 1
    template: str | None = None
    root: PathLike | None = None
    device: str = "auto"
    recipe: dict[str, Any] | str | None = None
    preset: str | None = None
    options: dict[str, Any] | None = None
    balance: bool = True
    unreadable: str = "stop"
    mode: str | None = None
    without: Any = None
    examples: PathLike | None = None
    calibrate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.recipe, str):
            if self.preset not in (None, self.recipe):
                raise UsageError(f"recipe {self.recipe!r} and preset {self.preset!r}: name one of them")
            object.__setattr__(self, "preset", self.recipe)
            object.__setattr__(self, "recipe", None)
        if self.shots is not None and self.shots < 0:
            raise UsageError(f"shots = {self.shots}: ask for at least 1 image per class, or for all with 0")
        if self.examples is not None and self.without is None:
            raise UsageError("examples show the values of a concept to remove; say which concept")

    def changed(self, **changes: Any) -> AdaptOptions:
        """The same options with some of them changed.

        Raises:
            UsageError: there is no such option.
        """
        known = [field.name for field in fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise UsageError(f"adapt has no option {unknown[0]!r}; its options are {', '.join(known)}")
        return replace(self, **changes)
