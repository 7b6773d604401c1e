"""A grid: the protocols by name, the cells that a request asks for, and their results on disk.

`plan` and `plan_study` turn a request into cells with every default written out. A `Grid` keeps one file per
cell: existing results are kept, missing ones are computed. A cell's file has a declared schema, checked
before its results reach a table or a page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from typing import Protocol as Interface

import msgspec
from msgspec import Meta

from dear._io.files import read_json, require_writable, write_atomic, write_json
from dear._io.text import Strict, Whole, check
from dear.bench.ablations import Study, Variant
from dear.bench.cells import SCHEMA, Cell, Outcome, Place, as_written, draw_path, file_digest
from dear.bench.protocols import Name, Protocol
from dear.bench.protocols.base_to_novel import BaseToNovel
from dear.bench.protocols.few_shot import FewShot
from dear.bench.protocols.held_out import HeldOut
from dear.bench.protocols.transfer import CROSS_DATASET, DOMAIN_SHIFT
from dear.data.images import check_template
from dear.errors import DearError, RoleError, RunError, UsageError
from dear.heads.roles import RoleMap
from dear.heads.rules import derive_roles
from dear.methods import find_method
from dear.methods.base import Method
from dear.runs.recipe import Recipe
from dear.runs.spec import digest, roles_digest

WHAT = "cell of a grid"
Share = Annotated[float, Meta(ge=0, le=1)]
_RENAMED = {"trainable_numbers": "trainable_parameters"}  # names in results of schema 1

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol for protocol in (BaseToNovel(), FewShot(), CROSS_DATASET, DOMAIN_SHIFT, HeldOut())
}
"""Every protocol by name."""


def find_protocol(name: str) -> Protocol:
    """A protocol by name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in PROTOCOLS:
        raise UsageError(f"no protocol {name!r}; choose from {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


@dataclass(frozen=True)
class Request:
    """What a grid is to compute.

    Attributes:
        backbone: name of the backbone, for people.
        fingerprint: of its weights.
        roles: the role map to start from; None where no method needs one.
        methods: names of methods; METHOD@PRESET takes the method with a preset of options and recipe.
        datasets: datasets to train on.
        seeds: one cell each.
        shots: images per class; None: the protocol's own (16; 1 to 16 for few-shot; all for domains).
        targets: datasets to test on (cross-dataset, domain shift); None: the paper's.
        options: options of methods, by method name.
        recipe: changes of the training recipe, for all methods.
        templates: prompt template of a dataset, where it is not the dataset's own.
        data_root: where benchmark datasets are kept.
        draws: folder of imported few-shot draws; None: they are drawn.
    """

    backbone: str
    fingerprint: str
    roles: RoleMap | None = None
    methods: Sequence[str] = ()
    datasets: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    shots: Sequence[int] | None = None
    targets: Sequence[str] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    data_root: str | None = None
    draws: str | None = None

    def options_of(self, method: str) -> Mapping[str, Any]:
        """Options for a method; upper and lower case are the same."""
        found = {name.lower(): values for name, values in self.options.items()}
        return found.get(method.lower(), {})

    def check(self, methods: Sequence[str]) -> None:
        """Refuse options and templates that would have no effect.

        Raises:
            UsageError: an option is for a method, or a template for a dataset, that is not planned.
        """
        planned = {_method(name)[0].name.lower() for name in methods}
        for name in self.options:
            if name.lower() not in planned:
                raise UsageError(
                    f"options are given for the method {name!r}, which is not planned; planned: "
                    f"{', '.join(sorted(planned))}"
                )
        for dataset, template in self.templates.items():
            if dataset not in self.datasets:
                raise UsageError(
                    f"a template is given for the dataset {dataset!r}, which is not planned; planned: "
                    f"{', '.join(self.datasets) or 'none'}"
                )
            check_template(template)
        if "seed" in self.recipe:
            raise UsageError("the recipe's seed is the cell's: name seeds, not a seed of the recipe")


def plan(protocol: str, request: Request) -> list[Cell]:
    """The cells of a protocol, in the order in which tables show them.

    Raises:
        UsageError: the request does not fit the protocol.
    """
    found = find_protocol(protocol)
    if not request.methods or not request.seeds:
        raise UsageError("name at least one method and one seed")
    request.check(request.methods)
    shots = found.shots if request.shots is None else tuple(request.shots)
    methods = [_method(name) for name in request.methods]
    return [
        _cell(found.name, request, kind, dataset, seed, count, setting, preset)
        for dataset, setting in found.settings(request)
        for kind, preset in methods
        for count in shots
        for seed in request.seeds
    ]


def plan_study(study: Study, request: Request) -> list[tuple[Variant, list[Cell]]]:
    """The cells of an ablation: for each variant those of all datasets and seeds.

    They are cells of the base-to-novel protocol, so what two studies share is computed once.

    Raises:
        UsageError: the request does not fit the study.
    """
    found = find_protocol(study.protocol)
    request.check([study.method])
    kind, _ = _method(study.method)
    shots = found.shots if request.shots is None else tuple(request.shots)
    if len(shots) > 1:
        raise UsageError(f"a study compares its variants at one number of shots; got {len(shots)}")
    return [
        (
            variant,
            [
                _cell(found.name, request, kind, dataset, seed, count, setting, variant)
                for dataset, setting in found.settings(request)
                for count in shots
                for seed in request.seeds
            ],
        )
        for variant in study.variants
    ]


def _method(name: str) -> tuple[type[Method], Variant]:
    """The class of METHOD or METHOD@PRESET, and the preset's options and recipe.

    Raises:
        UsageError: there is no such method or preset.
    """
    method, at, preset = name.partition("@")
    kind = find_method(method)
    if not at:
        return kind, Variant(kind.name)
    chosen = kind.preset(preset)
    return kind, Variant(name, chosen.options, recipe=chosen.recipe, fixed=False)


def _cell(
    protocol: str,
    request: Request,
    kind: type[Method],
    dataset: str,
    seed: int,
    shots: int,
    setting: Mapping[str, Any],
    variant: Variant,
) -> Cell:
    """One cell with the method's options and the recipe written out in full."""
    asked = request.options_of(kind.name)
    given = {**asked, **variant.options} if variant.fixed else {**variant.options, **asked}
    changes = {**request.recipe, **variant.recipe} if variant.fixed else {**variant.recipe, **request.recipe}
    recipe = as_written(Recipe.of(kind, **changes))
    del recipe["seed"]
    extra = dict(setting)
    if dataset in request.templates:
        extra["template"] = request.templates[dataset]
    if request.draws is not None:
        if not shots:
            raise UsageError("imported few-shot draws have no effect where all images are taken (0 shots)")
        extra["draw"] = file_digest(draw_path(request.draws, dataset, shots, seed))
    return Cell(
        protocol=protocol,
        method=kind.name,
        dataset=dataset,
        seed=seed,
        shots=shots,
        backbone=request.backbone,
        fingerprint=request.fingerprint,
        options=as_written(kind.configure(given)),
        recipe=recipe,
        roles=_roles(request, variant.roles.format(seed=seed)) if kind.uses_roles else {},
        setting=extra,
    )


def _roles(request: Request, spec: str) -> dict[str, str]:
    """The role map of a cell: how it is made from the given one, and its hash."""
    if request.roles is None:
        raise RoleError(
            f"{request.backbone} needs a role map for this: compute one with discover_roles", hint="roles"
        )
    return {"spec": spec, "digest": roles_digest(derive_roles(request.roles, spec))}


class Configuration(Strict, frozen=True):
    """The part `cell` of a file; the fields of `Cell`."""

    protocol: Name
    method: Name
    dataset: Name
    seed: Whole
    shots: Whole
    backbone: Name
    fingerprint: Name
    options: dict[Name, Any] = msgspec.field(default_factory=dict)
    recipe: dict[Name, Any] = msgspec.field(default_factory=dict)
    roles: dict[Name, Any] = msgspec.field(default_factory=dict)
    setting: dict[Name, Any] = msgspec.field(default_factory=dict)


class MadeWith(msgspec.Struct, frozen=True):
    """Versions and machine; more names are allowed."""

    dear: Name
    torch: Name
    hardware: Name


class Facts(msgspec.Struct, frozen=True):
    """What a method reports about itself; other names are allowed but not shown."""

    fusion_weights: dict[Name, float] = {}


class Result(msgspec.Struct, frozen=True):
    """What every result holds; protocols and later versions add columns and names of their own.

    Attributes:
        modes: mode -> column -> a fraction of 1, or null where nothing could be measured.
    """

    modes: Annotated[dict[Name, dict[Name, Share | None]], Meta(min_length=1)]
    facts: Facts = Facts()
    seconds: dict[Name, float] = {}
    trainable_parameters: Whole = 0
    adapter_bytes: Whole = 0
    steps: Whole = 0
    made_with: MadeWith | None = None


class Document(Strict, frozen=True):
    """A whole file."""

    schema: int
    key: Name
    cell: Configuration
    result: Result


def upgraded(document: Any) -> Any:
    """Convert a file of schema 1 to schema 2.

    Raises:
        ValueError: it is no whole cell, or was written by a later version.
    """
    if not isinstance(document, dict) or not {"schema", "key", "cell", "result"} <= set(document):
        raise ValueError("not a whole cell")
    if document["schema"] not in range(1, SCHEMA + 1) or isinstance(document["schema"], bool):
        raise ValueError(f"written by another version: schema {document['schema']!r}, here {SCHEMA}")
    result = document["result"]
    if isinstance(result, dict):
        result = {_RENAMED.get(name, name): value for name, value in result.items()}
    return {**document, "schema": SCHEMA, "result": result}


def read_cell(path: str | os.PathLike[str]) -> tuple[Cell, Mapping[str, Any]]:
    """The cell and the result in one file of a grid.

    Raises:
        DearError: the file is missing, damaged, or something else.
    """
    raw: dict[str, Any] = {}

    def upgrade(document: Any) -> Any:
        raw.update(upgraded(document))
        return raw

    source = os.fspath(path)
    document = check(read_json(path, WHAT), Document, source, WHAT, error=RunError, upgrade=upgrade)
    try:
        cell = Cell.from_file(msgspec.to_builtins(document.cell))
        key = cell.key
    except (TypeError, ValueError) as error:
        raise RunError(f"{source}: its configuration cannot be read ({error})") from None
    if key != document.key:
        raise RunError(f"{source}: was changed by hand: its key does not fit its configuration")
    if cell.protocol in PROTOCOLS:
        _check_columns(cell, document.result, source)
    return cell, raw["result"]


def _check_columns(cell: Cell, result: Result, source: str) -> None:
    """Refuse a setting or columns that the cell's protocol does not have."""
    protocol = PROTOCOLS[cell.protocol]
    check(dict(cell.setting), protocol.setting, source, f"setting of {protocol.name}", error=RunError)
    allowed = protocol.columns(cell)
    found = {column for row in result.modes.values() for column in row}
    if allowed is not None and not found <= allowed:
        raise RunError(f"{source}: {sorted(found - allowed)[0]!r} is no column of {protocol.name}")


Report = Callable[[Outcome], None]  #: called when a cell is done or has failed


class Engine(Interface):
    """Computes cells, in any order, on any machine."""

    def run(self, cells: Sequence[Cell], place: Place, report: Report) -> None:
        """Compute every cell and report each once; a failed one must not stop the others."""


@dataclass
class Summary:
    """What a run of a grid did.

    Attributes:
        kept: cells that were there already.
        computed: cells computed now.
        failed: message of each failed cell.
        notices: sentences the user should see.
    """

    kept: list[Cell] = field(default_factory=list)
    computed: list[Cell] = field(default_factory=list)
    failed: dict[Cell, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class Grid:
    """The folder of a grid: `cells/*.json`, `cells/*.error.json` and `draws/*.jsonl`.

    Args:
        folder: made when the first cell is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, cell: Cell) -> Path:
        """The file of a cell's result."""
        return self.folder / "cells" / f"{cell.stem}.json"

    def error_path(self, cell: Cell) -> Path:
        """The file that says why a cell failed."""
        return self.folder / "cells" / f"{cell.stem}.error.json"

    def read(self, cell: Cell) -> Mapping[str, Any] | None:
        """The stored result of a cell, or None where there is none.

        Raises:
            DearError: there is a file, but it is damaged or belongs to another configuration.
        """
        path = self.path(cell)
        if not path.exists():
            return None
        stored, result = read_cell(path)
        if stored.key != cell.key:
            raise RunError(f"{path}: holds another configuration than its name says")
        return result

    def store(self, outcome: Outcome) -> None:
        """Write a cell's result, or its error, whole; the few-shot draw goes to a file of its own."""
        cell, error = outcome.cell, self.error_path(outcome.cell)
        if outcome.result is None:
            write_json(error, {"key": cell.key, "cell": cell.plain(), "error": dict(outcome.error or {})})
            return
        result = dict(outcome.result)
        if "draw" in result:
            result["draw"] = self._store_draw(cell, result["draw"])
        document = {"schema": SCHEMA, "key": cell.key, "cell": cell.plain(), "result": result}
        write_json(self.path(cell), document)
        error.unlink(missing_ok=True)

    def _store_draw(self, cell: Cell, draw: Mapping[str, Any]) -> dict[str, Any]:
        """Write the drawn images as JSONL once, and return its name and hash for the cell's record."""
        text = str(draw["jsonl"])
        mark = digest(text)[:12]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", cell.dataset).strip("-.")
        shots = f"{cell.shots}shot" if cell.shots else "all"
        path = self.folder / "draws" / f"{words[-80:]}-{shots}-seed{cell.seed}-{mark}.jsonl"
        if not path.exists():
            write_atomic(path, text)
        kept = {key: value for key, value in draw.items() if key != "jsonl"}
        return {**kept, "file": f"draws/{path.name}", "digest": mark}

    def documents(self) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """(cell, result) of every whole cell file in the folder, in the order of names."""
        for path in sorted((self.folder / "cells").glob("*.json")):
            if path.name.endswith(".error.json"):
                continue
            try:
                yield read_cell(path)
            except DearError:
                continue  # reported when the grid runs; a table shows what is whole

    def run(
        self,
        cells: Iterable[Cell],
        place: Place,
        engine: Engine,
        watch: Callable[[Outcome | None, int, int], None] = lambda outcome, done, total: None,
    ) -> Summary:
        """Compute the cells that are missing and write each the moment it is done.

        Args:
            cells: what the grid should hold; repeated ones count once.
            place: where data and backbone are.
            engine: who computes.
            watch: called with (outcome, done, total); outcome is None for the first call.

        Returns:
            What was kept, computed and failed.
        """
        summary, missing = Summary(), []
        wanted = list(dict.fromkeys(cells))
        for cell in wanted:
            try:
                found = self.read(cell)
            except DearError as error:
                summary.notices.append(f"{error}; it is computed again")
                found = None
            if found is None:
                missing.append(cell)
            else:
                summary.kept.append(cell)
        done = len(summary.kept)
        watch(None, done, len(wanted))

        def report(outcome: Outcome) -> None:
            nonlocal done
            self.store(outcome)
            done += 1
            if outcome.result is None:
                summary.failed[outcome.cell] = str((outcome.error or {}).get("message", "unknown"))
            else:
                summary.computed.append(outcome.cell)
            watch(outcome, done, len(wanted))

        if missing:
            require_writable(self.folder / "cells")
            engine.run(missing, place, report)
        return summary
