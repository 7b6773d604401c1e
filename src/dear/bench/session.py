"""The session that computes one cell: backbone, roles, data, training and testing, with records.

Roles are the given map, or one that `derive` makes of it: what ablations change about the roles, by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch

from dear._io.files import read_safetensors, write_safetensors
from dear.bench.cells import Cell, Place, as_configured
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot, read_draw
from dear.errors import DearError, RoleError, RunError, UsageError
from dear.heads.known import known_roles, read_roles
from dear.heads.names import CONCEPTS, GENERAL
from dear.heads.roles import Role, RoleMap
from dear.heads.rules import rerule
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.train import Recipe, confidence, evaluate, train
from dear.train.evaluate import Evaluation
from dear.train.folder import roles_digest


@lru_cache(maxsize=1)
def backbone(name: str, device: str) -> Clip:
    """The backbone, loaded once per process."""
    return load(name, device=device)


def starting_roles(clip: Clip, file: str | None) -> RoleMap | None:
    """The role map that a grid starts from: a file, "table2", or (None) the one known for the backbone."""
    return known_roles(clip) if file is None else read_roles(file)


def of_labels(images: ImageSet, labels: Sequence[int]) -> ImageSet:
    """The images of some classes, renumbered; by label, since two of ImageNet's classes share a name."""
    if isinstance(images, FileImages):
        return images.select_labels(labels)
    return images.select_classes([images.classes[label] for label in labels])


class Session:
    """One cell's work in progress.

    Args:
        cell: what to compute.
        place: where data and backbone are.

    Attributes:
        record: what is to be known of the cell beside its accuracies.
    """

    def __init__(self, cell: Cell, place: Place) -> None:
        self.cell, self.place = cell, place
        self.clip = backbone(place.backbone, place.device)
        if self.clip.fingerprint != cell.fingerprint:
            raise RunError(
                f"{place.backbone}: these weights are {self.clip.fingerprint[:19]}…, but the cell was "
                f"planned for {cell.fingerprint[:19]}…; start the grid again with one backbone"
            )
        self.record: dict[str, Any] = {}
        self.seconds = {"train": 0.0, "evaluate": 0.0}

    def open(self, split: str, dataset: str | None = None) -> ImageSet:
        """A split of the cell's dataset, or of another one, which has its own template."""
        own = dataset is None or dataset == self.cell.dataset
        template = self.cell.setting.get("template") if own else None
        return open_data(dataset or self.cell.dataset, split, root=self.place.data_root, template=template)

    def draw(self, images: ImageSet, labels: Sequence[int] | None = None) -> ImageSet:
        """The images to train on: the cell's shots of each class, or all for 0 shots.

        Args:
            images: the whole training split.
            labels: the classes to keep, if not all.
        """
        imported = self._imported()
        if imported is not None:
            drawn = images.subset(read_draw(imported, images))
            drawn = drawn if labels is None else of_labels(drawn, labels)
        else:
            drawn = images if labels is None else of_labels(images, labels)
            drawn = few_shot(drawn, self.cell.shots, self.cell.seed) if self.cell.shots else drawn
        lines = [
            json.dumps({"path": drawn.key(i), "label": y, "class": drawn.classes[y]}, ensure_ascii=False)
            for i, y in enumerate(drawn.labels.tolist())
        ]
        self.record["draw"] = {
            "images": len(drawn),
            "imported": imported is not None,
            "jsonl": "".join(line + "\n" for line in lines),
        }
        return drawn

    def _imported(self) -> str | None:
        """The file of an imported draw, checked to be the one that the cell was planned with."""
        wanted = self.cell.setting.get("draw")
        if wanted is None:
            return None
        path = draw_path(self.place.draws or ".", self.cell.dataset, self.cell.shots, self.cell.seed)
        if file_mark(path) != wanted:
            raise RunError(f"{path}: the draw was changed after the cell was planned")
        return path

    def roles(self) -> RoleMap | None:
        """The role map that the cell names, derived again and checked by its hash."""
        if not self.cell.roles:
            return None
        start = starting_roles(self.clip, self.place.roles_file)
        if start is None:
            raise RoleError(
                f"{self.clip.name} needs a role map: compute one with discover_roles", hint="roles"
            )
        found = derive(start, str(self.cell.roles["spec"]))
        if roles_digest(found) != self.cell.roles["digest"]:
            raise RoleError("the role map was changed after the cell was planned; start the grid again")
        return found

    def fit(self, images: ImageSet, keep: bool = False) -> Method:
        """Build the cell's method on the set's classes and train it; its size and time are recorded.

        Args:
            images: the training set.
            keep: keep the adapter for other protocols, and take theirs; for training on all classes.
        """
        cell = self.cell
        method = build_method(
            cell.method,
            self.clip,
            images.classes,
            roles=self.roles(),
            template=images.template,
            seed=cell.seed,
            **as_configured(find_method(cell.method).Config, cell.options),
        )
        if keep and self._take(method):
            return self._sized(method)
        recipe = Recipe.of(type(method), **as_configured(Recipe, {**cell.recipe, "seed": cell.seed}))
        began = time.perf_counter()
        trained = train(method, images, recipe)
        self.seconds["train"] += time.perf_counter() - began
        self.record["steps"] = trained.steps
        path = self._adapter()
        if keep and path is not None:
            facts = {"steps": str(trained.steps), "seconds": f"{self.seconds['train']:.3f}"}
            write_safetensors(path, method.adapter_state(), facts)
        return self._sized(method)

    def _adapter(self) -> Path | None:
        """Where the cell's adapter is kept for other protocols."""
        if self.place.adapters is None:
            return None
        return Path(self.place.adapters) / f"{self.cell.method}-{self.cell.training_key}.safetensors"

    def _take(self, method: Method) -> bool:
        """Load the adapter that another protocol trained, bit for bit; False where there is none."""
        path = self._adapter()
        if path is None or not path.exists():
            return False
        try:
            state, facts = read_safetensors(path, "adapter")
            method.load_adapter_state(state, str(path))
            self.record |= {"steps": int(facts["steps"]), "trained_before": True}
            self.seconds["train"] = float(facts["seconds"])
        except (DearError, KeyError, ValueError):  # damaged: train again and write it anew
            return False
        return True

    def _sized(self, method: Method) -> Method:
        """Record how large the method is and what it knows."""
        state = {name: tensor.cpu().contiguous() for name, tensor in method.adapter_state().items()}
        self.record |= {
            "trainable_parameters": method.trainable_parameters,
            "adapter_bytes": len(safetensors.torch.save(state)) if state else 0,
            "facts": method.facts(),
        }
        return method

    def test(self, method: Method, images: ImageSet) -> Evaluation | None:
        """Answers in every mode on a dataset, chosen among exactly the dataset's own classes.

        None where the method cannot name classes that it was not trained on.
        """
        began = time.perf_counter()
        if images.classes != method.classes or images.template != method.template:
            if not method.open_classes:
                return None
            method = method.with_classes(images.classes, images.template)
        found = evaluate(method, images, precision=str(self.cell.recipe.get("precision", "auto")))
        self.seconds["evaluate"] += time.perf_counter() - began
        tested = self.record.setdefault("tested", {})
        tested[images.name] = tested.get(images.name, 0) + len(images)
        return found

    def finish(self, modes: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
        """The whole result: accuracies by mode, then how they came about."""
        return {
            "modes": {mode: dict(values) for mode, values in modes.items()},
            **self.record,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "made_with": made_with(self.place),
        }


def calibration_error(found: Evaluation, mode: str) -> float:
    """Expected calibration error of a mode: |accuracy - confidence| of each bin, weighted by its images."""
    return confidence.calibration_error(found.confidence[mode], found.answers[mode] == found.labels)


def made_with(place: Place) -> dict[str, Any]:
    """Versions and machine: what a reader needs to judge a difference in the last digits."""
    from dear import __version__

    device = torch.device(place.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "dear": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "hardware": name,
        "threads": place.threads,
    }


def draw_path(folder: str, dataset: str, shots: int, seed: int) -> str:
    """Where an imported draw is looked for: `FOLDER/DATASET-16shot-seed1.jsonl`."""
    safe = dataset.replace(":", "-").replace("/", "-").replace(os.sep, "-")
    return os.path.join(folder, f"{safe}-{shots}shot-seed{seed}.jsonl")


def file_mark(path: str) -> str:
    """Hash of a file's content.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError as error:
        raise RunError(f"{path}: the imported draw cannot be read ({error.strerror})") from None


ROLE_CHANGES = ("uniform", "shuffled", "quantile", "dominant", "concepts", "from")


def derive(roles: RoleMap, spec: str) -> RoleMap:
    """The map that `spec` makes of `roles`: changes joined by "+", each applied to the one before.

    Args:
        roles: the map to start from.
        spec: "" (as it is), "uniform:mixed", "uniform:generalization", "shuffled:SEED", "quantile:Q",
            "dominant:TAU", "concepts:K" (K core concepts), "from:LAYER" (covers layers from LAYER on;
            heads that were never measured are mixed).

    Raises:
        UsageError: the spec is none of these.
        RoleError: the map holds no measured shares to apply a rule to.

    >>> derive(RoleMap.table2(), "concepts:3").core
    ('Location', 'Object', 'Texture')
    >>> derive(RoleMap.table2(), "from:8+uniform:mixed").counts()["mixed"]
    60
    """
    for part in filter(None, spec.split("+")):
        roles = _apply(roles, part)
    return roles


def _apply(roles: RoleMap, part: str) -> RoleMap:
    name, _, value = part.partition(":")
    try:
        if name == "uniform":
            made = RoleMap.uniform(value, roles.layers, roles.heads, roles.core)
            return replace(made, backbone=roles.backbone, fingerprint=roles.fingerprint, depth=roles.depth)
        if name == "shuffled":
            return roles.shuffled(int(value))
        if name in ("quantile", "dominant"):
            return rerule(roles, name, float(value))
        if name == "concepts":
            return with_concepts(roles, int(value))
        if name == "from":
            return from_layer(roles, int(value))
    except ValueError:
        raise UsageError(f"roles {part!r}: {value!r} is not a number") from None
    raise UsageError(f"roles {part!r}: choose from {', '.join(kind + ':…' for kind in ROLE_CHANGES)}")


def with_concepts(roles: RoleMap, count: int) -> RoleMap:
    """The map with `count` core concepts instead of its own.

    Fewer: those of the core concepts that lead the most heads. More: the core ones and those of the other
    concepts (never Style) that lead the most heads. Specialized heads whose concept is core are core heads,
    the others are isolated; generalization and mixed heads stay.

    Raises:
        UsageError: there are not that many concepts.
    """
    most = len(CONCEPTS) - 1
    if not 1 <= count <= most:
        raise UsageError(f"concepts:{count}: between 1 and {most} concepts can be core")
    specialized = [role.concept for _, role in roles if role.kind in ("core", "other")]
    if count == len(roles.core):
        return roles
    order = {concept: place for place, concept in enumerate(CONCEPTS)}

    def rank(concept: str) -> tuple[int, int]:
        return -specialized.count(concept), order.get(concept, len(order))

    own = sorted(roles.core, key=rank)
    others = sorted((c for c in CONCEPTS if c not in roles.core and c != GENERAL), key=rank)
    chosen = (own + others)[:count]
    core = tuple(chosen)

    def again(role: Role) -> Role:
        if role.kind not in ("core", "other"):
            return role
        return replace(role, kind="core" if role.concept in core else "other")

    table = {key: again(role) for key, role in roles}
    return replace(roles, table=table, core=core, parameters={**roles.parameters, "concepts": count})


def from_layer(roles: RoleMap, first: int) -> RoleMap:
    """The map for layers `first` and above: lower layers are dropped, layers never measured are mixed.

    Raises:
        UsageError: no layer of the map is left.
    """
    last = roles.layers[-1]
    if not 1 <= first <= last:
        raise UsageError(f"from:{first}: the role map ends at layer {last}")
    table = {
        (layer, head): roles.table.get((layer, head), Role("mixed"))
        for layer in range(first, last + 1)
        for head in range(roles.heads)
    }
    return replace(roles, table=table, parameters={**roles.parameters, "from": first})
