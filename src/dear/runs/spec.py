"""`Spec`: everything that determines a training; callers fill it in, `config.json` and bench cells store it.

A caller sets the fields that differ from the defaults. `dear.train.setup.prepare` returns the complete
Spec: options and recipe written out, digests of images, backbone, role map and correction filled in. A
complete Spec can be prepared again for the same training, which is how runs are repaired and compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dear.data.content import content_digest
from dear.data.images import DataSource, ImageSet, targets_of
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.methods.base import Method
from dear.runs.recipe import Recipe
from dear.utils.digest import of_json, of_parts
from dear.utils.schema import Strict, Whole
from dear.utils.text import PRINTABLE

SCHEMA = 1
Name = Annotated[str, Meta(max_length=4096, pattern=PRINTABLE)]  #: text without control characters
#: fields that determine what is learned, and their names in messages
_DECISIVE = {
    "method": "method",
    "options": "options",
    "recipe": "recipe",
    "seed": "seed",
    "classes": "classes",
    "template": "template",
    "ids": "token ids",
    "identity": "backbone",
    "roles_digest": "role map",
    "data_digest": "training images",
    "balance": "balance",
    "correction": "removed concepts",
    "copies": "edited copies",
    "focus": "focus",
    "calibrate": "calibrate",
}
#: the same for fields that are left out of the key if they are not set, so that older keys stay valid
_DECISIVE_IF_SET = {
    "unlabeled_digest": "unlabeled images",
    "unlabeled_weight": "weight of unlabeled images",
    "texts": "texts of the classes",
    "task": "labels per image",
    "extended": "added classes",
}


def plain(value: Any) -> Any:
    """The value as JSON returns it: tuples as lists, at any depth."""
    return json.loads(json.dumps(value))


def digest(value: Any) -> str:
    """Digest of the canonical JSON of `value`, in hexadecimal."""
    return of_json(value).hex()


def roles_digest(roles: RoleMap) -> str:
    """Hash of what a method reads of a role map: the kind of each head, and the concept of core heads."""
    heads = [[*key, role.kind, role.concept if role.kind == "core" else None] for key, role in roles]
    return digest({"core": roles.core, "heads": heads})


def data_digest(images: ImageSet) -> str:
    """Hash of labels, names, domains and contents of all images, in their order."""
    domains = images.domains or ("",) * len(images)
    parts: list[str | bytes] = []
    for index, (label, domain) in enumerate(zip(images.labels.tolist(), domains, strict=True)):
        parts += [f"{label} {domain}\n{images.key(index)}\n", content_digest(images, index)]
    targets = targets_of(images)
    if targets is not None:
        parts.append(targets.numpy().tobytes())
    return of_parts(*parts).hex()


class Spec(Strict, frozen=True):
    """Everything that determines a training."""

    format: Literal["dear run"] = "dear run"
    schema: Literal[1] = 1
    dear: str = ""  #: version that completed it

    method: Name = "dear"
    preset: Name | None = None  #: named setting of the method ("strong", "paper"); None: the recommended one
    options: dict[str, Any] = msgspec.field(default_factory=dict)  #: of the method, by name
    recipe: dict[str, Any] = msgspec.field(default_factory=dict)  #: values of `Recipe`, by name
    seed: int = 1  #: of the draw, of the initial values, of the order and of the views
    calibrate: bool = True  #: fit probabilities and the threshold for "none of these" by cross-validation

    data: Name | None = None  #: what `open_data` takes; None: images in memory
    root: str | None = None  #: folder of the benchmarks, for the name of one
    split: str = "train"
    margin: float = 0.0  #: around boxes of the data, as a fraction of the box
    dataset: Name = ""  #: name of the data, which the draw of shots depends on
    shots: Whole = 0  #: images per class; 0: all
    balance: bool = True  #: repeat images of rare classes, so that every class counts alike
    unlabeled: Name | None = None  #: images without labels: folder, table, dataset, or "rest" of the draw
    unlabeled_weight: float | None = None  #: of one, relative to a labeled image; None: decided by measuring
    unlabeled_digest: str = ""  #: of their names and contents
    unreadable: Literal["stop", "skip"] = "stop"  #: what to do with images that cannot be read
    images: Whole = 0  #: number of distinct training images
    data_digest: str = ""  #: of their labels, names and contents
    classes: tuple[str, ...] = ()  #: names in the order of the labels; empty: all of the data
    template: Name = ""  #: prompt with `{}` for the class; empty: that of the data
    ids: tuple[tuple[int, ...], ...] | None = None  #: token ids instead of prompts
    #: sentences by class, of trained and further classes; their means are in the run's `texts.safetensors`
    texts: dict[Name, tuple[Name, ...]] = msgspec.field(default_factory=dict)
    #: classes that were added to the trained ones afterwards, and the number of their images
    extended: dict[Name, Whole] = msgspec.field(default_factory=dict)
    #: parent of each class and inner node of a tree, for answers; training does not depend on it
    tree: dict[Name, Name] = msgspec.field(default_factory=dict)
    task: Literal["one label", "several labels"] = "one label"  #: per image; follows from the data

    backbone: Name = "mini"
    backbone_path: str | None = None  #: absolute path of the weights, if they are files of the user
    identity: Name = ""  #: hash of the whole backbone: both towers, temperature, architecture, preprocessing
    fingerprint: Name = ""  #: hash of the visual weights, which role maps name

    roles: str | None = None  #: file of a role map, or "table2"; None: the map of the backbone
    roles_digest: Name | None = None
    allow_other_roles: bool = False  #: accept a role map that was computed on other weights
    without: tuple[str, ...] = ()  #: concepts to remove before training
    way: str = "auto"  #: how they are removed
    examples: dict[str, str] = msgspec.field(default_factory=dict)  #: folder of examples by concept
    copies: tuple[str, ...] = ()  #: kinds of edits (`dear.shortcuts.edits`) whose copies join the training
    focus: str | None = None  #: role whose heads to learn with, or "auto"; `options` contain the result
    correction: dict[str, Any] | None = None  #: of the image feature; see `dear.runs.folder.read_correction`

    #: added by a caller; does not affect training
    extra: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, method: Method, recipe: Recipe, images: ImageSet, start: Spec | None = None) -> Spec:
        """The complete Spec of training `method` on `images` (each once), with other fields of `start`."""
        from dear import __version__

        start = cls(calibrate=False, seed=recipe.seed, balance=False) if start is None else start
        ids, used = method.prompts.token_ids, method.roles if method.uses_roles else None
        source, clip = getattr(images, "source", None), method.clip
        if source is None:
            source = DataSource(images.name) if images.name.startswith("world:") else None
        return msgspec.structs.replace(
            start,
            dear=__version__,
            method=method.name,
            options=plain(asdict(method.config)),
            recipe=plain(asdict(recipe)),
            data=start.data if source is None else source.spec,
            root=start.root if source is None else source.root,
            dataset=images.name,
            images=len(images),
            data_digest=data_digest(images),
            classes=method.classes,
            template=method.template,
            ids=None if ids is None else tuple(map(tuple, ids.tolist())),
            task="several labels" if method.several else "one label",
            texts={name: tuple(some) for name, some in method.prompts.texts.sentences.items()},
            backbone=clip.name,
            backbone_path=getattr(clip, "source", None),
            identity=clip.identity,
            fingerprint=clip.fingerprint,
            roles_digest=None if used is None else roles_digest(used),
            allow_other_roles=method.allow_other_roles,
            correction=None if clip.correction is None else clip.correction.summary,
        )

    def changed(self, **changes: Any) -> Spec:
        """A copy with some fields changed; None resets a field to its default."""
        known = {field.name: field for field in msgspec.structs.fields(self)}
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise UsageError(f"a training has no option {unknown[0]!r}; its options are {', '.join(known)}")
        if isinstance(changes.get("recipe"), str):  # the name of a preset
            if changes.get("preset") not in (None, changes["recipe"]):
                raise UsageError(
                    f"recipe {changes['recipe']!r} and preset {changes['preset']!r}: name one of them"
                )
            changes |= {"preset": changes["recipe"], "recipe": None}
        data = changes.get("data")
        if data is not None and not isinstance(data, str | os.PathLike):
            raise UsageError(
                f"data must be a path, a name, or an image set, got {type(data).__name__}; for images and "
                "labels in lists use dear.Classifier().fit(images, labels)"
            )
        values: dict[str, Any] = msgspec.to_builtins(self)
        for name, value in changes.items():
            field = known[name]
            if value is not None:
                values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
            elif field.default_factory is not msgspec.NODEFAULT:
                values[name] = field.default_factory()
            else:
                values[name] = field.default
        shots = values["shots"]
        if isinstance(shots, int) and shots < 0:
            raise UsageError(f"shots must be at least 1, or 0 for all images, got {shots}")
        weight = values["unlabeled_weight"]
        if isinstance(weight, int | float) and not 0 <= weight <= 1:
            raise UsageError(f"unlabeled_weight must be from 0 to 1, got {weight}")
        if values["examples"] and not values["without"]:
            raise UsageError("examples need a concept to remove; name it with `without`")
        try:
            return msgspec.convert(msgspec.to_builtins(values), type(self))
        except msgspec.ValidationError as error:
            raise UsageError(f"invalid training settings: {error}") from None

    @property
    def key(self) -> str:
        """Hash of everything that determines what is learned, sixteen hexadecimal digits."""
        return digest(self._decisive_fields())[:16]

    def _decisive_fields(self) -> dict[str, Any]:
        values = {name: plain(getattr(self, name)) for name in _DECISIVE}
        values["correction"] = self.correction and self.correction.get("digest")
        if (self.unlabeled_digest or self.unlabeled) and self.unlabeled_weight != 0:
            source = self.unlabeled_digest or self.unlabeled  # a planned training knows no digest yet
            values |= {"unlabeled_digest": source, "unlabeled_weight": self.unlabeled_weight}
        if self.texts:
            values["texts"] = plain(self.texts)
        if self.several:
            values["task"] = self.task
        if self.extended:
            values["extended"] = plain(self.extended)
        return values

    def differences(self, other: Spec) -> list[str]:
        """Names of the parts that differ; for options and recipe with the names of their values.

        >>> spec = Spec(method="coop", options={"context": 4}, template="{}")
        >>> spec.differences(spec.changed(options={"context": 8}, template="a {}", preset="paper"))
        ['options (context)', 'template']
        """
        differing = []
        fields, other_fields = self._decisive_fields(), other._decisive_fields()
        for name, words in (_DECISIVE | _DECISIVE_IF_SET).items():
            value, other_value = fields.get(name), other_fields.get(name)
            if isinstance(value, dict) and isinstance(other_value, dict) and value != other_value:
                names = [key for key in {**value, **other_value} if value.get(key) != other_value.get(key)]
                differing.append(f"{words} ({', '.join(names)})")
            elif value != other_value:
                differing.append(words)
        return differing

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @property
    def several(self) -> bool:
        """Whether images have several labels."""
        return self.task == "several labels"

    def backbone_source(self) -> str | Path:
        """What to load as the backbone: its original path if that exists, otherwise its name."""
        path = self.backbone_path
        return Path(path) if path and os.path.isabs(path) and os.path.exists(path) else self.backbone
