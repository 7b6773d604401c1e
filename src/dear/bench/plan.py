"""From what a user asks for to the cells of a grid, with every default written out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dear.bench import few_shot, transfer
from dear.bench.ablations import Study, Variant
from dear.bench.cells import Cell
from dear.bench.held_out import domains_of, splits_of
from dear.bench.rolespec import derive, mark
from dear.bench.session import draw_path, file_mark
from dear.data.open import open_data
from dear.errors import RoleError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.train import Recipe

PROTOCOLS = ("base-to-novel", "few-shot", "cross-dataset", "domain-shift", "leave-one-domain-out")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks of a grid.

    Attributes:
        backbone: name of the backbone, for people.
        fingerprint: of its weights.
        roles: the role map to start from; None where no method needs one.
        methods: names of methods.
        datasets: datasets to train on.
        seeds: one cell each.
        shots: images a class; None: the protocol's own (16; 1 to 16 for few-shot; all for domains).
        targets: datasets to test on (cross-dataset, domain shift); None: the paper's.
        options: options of methods, by method name.
        recipe: changes of the training recipe, for all methods.
        data_root: where benchmark datasets are kept.
        draws: folder of imported few-shot draws; None: they are drawn.
    """

    backbone: str
    fingerprint: str
    roles: RoleMap | None = None
    methods: Sequence[str] = ("zeroshot", "dear")
    datasets: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    shots: Sequence[int] | None = None
    targets: Sequence[str] | None = None
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_root: str | None = None
    draws: str | None = None


def plan(protocol: str, request: Request) -> list[Cell]:
    """The cells of a protocol, in the order in which tables show them.

    Raises:
        UsageError: the request does not fit the protocol.
    """
    if protocol not in PROTOCOLS:
        raise UsageError(f"no protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    if not request.methods or not request.seeds:
        raise UsageError("name at least one method and one seed")
    defaults = {"few-shot": few_shot.SHOTS, "leave-one-domain-out": (0,)}
    shots = defaults.get(protocol, (16,)) if request.shots is None else tuple(request.shots)
    cells = []
    for dataset, setting in _settings(protocol, request):
        for method in request.methods:
            for count in shots:
                for seed in request.seeds:
                    cells.append(_cell(protocol, request, method, dataset, seed, count, setting))
    return cells


def _settings(protocol: str, request: Request) -> list[tuple[str, dict[str, Any]]]:
    """(dataset to train on, what else the protocol needs) of each column."""
    if protocol in ("cross-dataset", "domain-shift"):
        if len(request.datasets) > 1:
            raise UsageError(
                f"{protocol} trains on one dataset; got {', '.join(request.datasets)}",
                hint="targets",
            )
        source = request.datasets[0] if request.datasets else transfer.SOURCE
        usual = transfer.TARGETS if protocol == "cross-dataset" else transfer.VARIANTS
        targets = list(usual if request.targets is None else request.targets)
        if not targets or source in targets:
            raise UsageError(f"{protocol}: targets must name datasets other than {source}", hint="targets")
        return [(source, {"targets": targets})]
    if request.targets is not None:
        raise UsageError("targets belong to cross-dataset and domain-shift", hint="targets")
    if not request.datasets:
        raise UsageError(f"{protocol}: name the datasets", hint="datasets")
    if protocol == "leave-one-domain-out":
        return [
            (dataset, {"held_out": domain})
            for dataset in request.datasets
            for domain in domains_of(open_data(dataset, splits_of(dataset)[0], root=request.data_root))
        ]
    return [(dataset, {}) for dataset in request.datasets]


def _cell(
    protocol: str,
    request: Request,
    method: str,
    dataset: str,
    seed: int,
    shots: int,
    setting: Mapping[str, Any],
    variant: Variant | None = None,
) -> Cell:
    """One cell with the method's options and the recipe written out in full."""
    kind = find_method(method)
    given = {**request.options.get(kind.name, {}), **(variant.options if variant else {})}
    recipe = dataclasses.asdict(Recipe.of(kind, **request.recipe))
    del recipe["seed"]
    extra = dict(setting)
    if request.draws is not None and shots:
        path = draw_path(request.draws, dataset, shots, seed)
        if os.path.exists(path):
            extra["draw"] = file_mark(path)
    return Cell(
        protocol=protocol,
        method=kind.name,
        dataset=dataset,
        seed=seed,
        shots=shots,
        backbone=request.backbone,
        fingerprint=request.fingerprint,
        options=dataclasses.asdict(kind.configure(given)),
        recipe=recipe,
        roles=_roles(request, variant.roles.format(seed=seed) if variant else "") if kind.uses_roles else {},
        setting=extra,
    )


def _roles(request: Request, spec: str) -> dict[str, str]:
    """The role map of a cell: how it is made from the given one, and its hash."""
    if request.roles is None:
        raise RoleError(
            f"{request.backbone} needs a role map for this: compute one with discover_roles", hint="roles"
        )
    return {"spec": spec, "digest": mark(derive(request.roles, spec))}


def plan_study(study: Study, request: Request, method: str = "dear") -> list[tuple[Variant, list[Cell]]]:
    """The cells of an ablation: for each variant those of all datasets and seeds.

    They are cells of the base-to-novel protocol, so what two studies share is computed once.

    Raises:
        UsageError: the request names no dataset.
    """
    if not request.datasets:
        raise UsageError("name the datasets", hint="datasets")
    shots = (16,) if request.shots is None else tuple(request.shots)
    return [
        (
            variant,
            [
                _cell("base-to-novel", request, method, dataset, seed, count, {}, variant)
                for dataset in request.datasets
                for count in shots
                for seed in request.seeds
            ],
        )
        for variant in study.variants
    ]
