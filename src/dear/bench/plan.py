"""Turns a request into the cells of a grid, with every default written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dear.bench.ablations import Study, Variant
from dear.bench.cells import Cell, as_written
from dear.bench.protocols import find_protocol
from dear.bench.session import derive, draw_path, file_mark
from dear.data.images import check_template
from dear.errors import RoleError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.methods.base import Method
from dear.train import Recipe
from dear.train.folder import roles_digest


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks of a grid.

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
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    templates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data_root: str | None = None
    draws: str | None = None

    def options_of(self, method: str) -> Mapping[str, Any]:
        """Options for a method; upper and lower case are the same."""
        found = {name.lower(): values for name, values in self.options.items()}
        return found.get(method.lower(), {})

    def check(self, methods: Sequence[str]) -> None:
        """Refuse what would have no effect.

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
        extra["draw"] = file_mark(draw_path(request.draws, dataset, shots, seed))
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
    return {"spec": spec, "digest": roles_digest(derive(request.roles, spec))}
