"""What a run is made of: everything that decides what it learns, as `config.json` holds it.

A `RunIdentity` holds everything that determines what a run learns; it is compared on resuming and hashed for
keys. A `RunConfig` is `config.json`: the identity, and what a reader of the folder needs beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dear._io.text import Strict, Whole
from dear.clip.correction import Correction
from dear.data.images import ImageSet
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.methods.base import Method
from dear.methods.options import earlier_values
from dear.runs.recipe import Recipe

SCHEMA = 1
_WORDS = {"roles": "role map", "fingerprint": "backbone", "data": "training images", "ids": "token ids"}


def plain(value: Any) -> Any:
    """Tuples as lists, all the way down: what JSON gives back."""
    return json.loads(json.dumps(value))


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, tuples as lists.

    >>> canonical({"b": (1, 2), "a": 0.5})
    '{"a":0.5,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def roles_digest(roles: RoleMap) -> str:
    """Hash of what a method sees of a role map: the kind of each head and, of core heads, the concept."""
    heads = [[*key, role.kind, role.concept if role.kind == "core" else None] for key, role in roles]
    return digest({"core": roles.core, "heads": heads})


def data_digest(images: ImageSet) -> str:
    """Hash of the labels and names of all images, in their order."""
    keys = hashlib.sha256()
    for index, label in enumerate(images.labels.tolist()):
        keys.update(f"{label} {images.key(index)}\n".encode("utf-8", "surrogatepass"))
    return keys.hexdigest()


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Everything that decides what a run learns; runs with equal identities learn the same.

    Attributes:
        method: name of the method.
        options: its options, all of them.
        recipe: the training recipe, all of it.
        classes: class names in the order of the labels.
        template: the prompt around a class name.
        ids: token ids that were given instead of prompts.
        fingerprint: hash of the backbone's weights.
        roles: hash of the role map; None where none is used.
        data: hash of the training images' names and labels.
        correction: hash of the correction of the image feature; None where there is none.
        preset: name of the setting that options and recipe were taken from.
    """

    method: str
    options: Mapping[str, Any]
    recipe: Mapping[str, Any]
    classes: tuple[str, ...]
    template: str
    ids: tuple[tuple[int, ...], ...] | None
    fingerprint: str
    roles: str | None
    data: str
    correction: str | None = None
    preset: str | None = None

    @classmethod
    def of(cls, method: Method, recipe: Recipe, images: ImageSet, preset: str | None = None) -> RunIdentity:
        """The identity of a run that is to train `method` on `images`."""
        ids = method.prompts.given
        used = method.roles if method.uses_roles else None
        return cls(
            method=method.name,
            options=plain(dataclasses.asdict(method.config)),
            recipe=plain(dataclasses.asdict(recipe)),
            classes=method.classes,
            template=method.template,
            ids=None if ids is None else tuple(map(tuple, ids.tolist())),
            fingerprint=method.clip.fingerprint,
            roles=None if used is None else roles_digest(used),
            data=data_digest(images),
            correction=None if method.clip.correction is None else method.clip.correction.digest,
            preset=preset,
        )

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that change with any part, but for the preset's name."""
        parts = dataclasses.asdict(self)
        del parts["preset"]  # the options and the recipe say what it stands for
        return digest(parts)[:16]

    def differences(self, other: RunIdentity) -> list[str]:
        """What differs, in words: the parts, and of options and recipe the names in them.

        >>> one = RunIdentity("coop", {"context": 4}, {"lr": 1.0}, ("a",), "{}", None, "sha256:0", None, "0")
        >>> one.differences(dataclasses.replace(one, options={"context": 8}, template="a {}"))
        ['options (context)', 'template']
        """
        found = []
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "preset" or ours == theirs:
                continue
            words = _WORDS.get(field.name, field.name)
            if isinstance(ours, Mapping):
                names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
                words = f"{words} ({', '.join(names)})"
            found.append(words)
        return found


class DataConfig(Strict, frozen=True):
    """The training images."""

    name: str
    images: Whole
    digest: str
    source: str | None = None  #: absolute path, or name that `open_data` takes
    root: str | None = None  #: absolute path of the folder of the benchmarks, for the name of one

    def spec(self) -> str | None:
        """What `open_data` takes to open the same data, with `root`; None where the run does not say."""
        return self.name if self.source is None and self.name.startswith("world:") else self.source


class RunConfig(Strict, frozen=True):
    """The whole file."""

    format: Literal["dear run"]
    schema: Literal[1]
    dear: str
    method: str
    options: dict[str, Any]
    classes: list[str]
    template: str
    ids: list[list[int]] | None
    backbone: str
    fingerprint: str
    allow_other_roles: bool
    recipe: dict[str, Any]
    data: DataConfig
    backbone_path: str | None = None  #: absolute path of the weights, where they are files of the user
    roles: str | None = None  #: hash of the role map
    correction: dict[str, Any] | None = None  #: of the image feature; see `dear.runs.folder.read_correction`
    preset: str | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)  #: what a caller of `Trained.save` added

    @property
    def identity(self) -> RunIdentity:
        """What must agree for the run to be continued."""
        return RunIdentity(
            method=self.method,
            options=self.all_options(),
            recipe={**plain(earlier_values(Recipe)), **self.recipe},
            classes=tuple(self.classes),
            template=self.template,
            ids=None if self.ids is None else tuple(map(tuple, self.ids)),
            fingerprint=self.fingerprint,
            roles=self.roles,
            data=self.data.digest,
            correction=None if self.correction is None else str(self.correction.get("digest")),
            preset=self.preset,
        )

    def all_options(self) -> dict[str, Any]:
        """The method's options; those that it got after this run are as the run was trained without them."""
        return {**plain(earlier_values(find_method(self.method).Config)), **self.options}

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    def weights(self) -> str | Path:
        """What to load as the backbone: the path it was loaded from, while it exists; else its name."""
        path = self.backbone_path
        return Path(path) if path and os.path.isabs(path) and os.path.exists(path) else self.backbone


def describe(method: Method, recipe: Recipe, images: ImageSet, preset: str | None = None) -> RunConfig:
    """The configuration of a run that is to train `method` on `images`."""
    from dear import __version__

    identity = RunIdentity.of(method, recipe, images, preset)
    source = getattr(images, "source", None)
    return RunConfig(
        format="dear run",
        schema=1,
        dear=__version__,
        method=identity.method,
        options=dict(identity.options),
        classes=list(identity.classes),
        template=identity.template,
        ids=None if identity.ids is None else [list(row) for row in identity.ids],
        backbone=method.clip.name,
        backbone_path=getattr(method.clip, "source", None),
        fingerprint=identity.fingerprint,
        allow_other_roles=method.allow_other_roles,
        recipe=dict(identity.recipe),
        data=DataConfig(
            name=images.name,
            images=len(images),
            digest=identity.data,
            source=None if source is None else source.spec,
            root=None if source is None else source.root,
        ),
        roles=identity.roles,
        correction=_described(method.clip.correction),
        preset=identity.preset,
    )


def _described(correction: Correction | None) -> dict[str, Any] | None:
    """The correction's part of `config.json`; None: the run has none."""
    if correction is None:
        return None
    return {
        "note": correction.note,
        "heads": [list(head) for head in correction.heads],
        "digest": correction.digest,
    }
