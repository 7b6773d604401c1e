"""From a request to cells: every default written out, every image hashed that is trained or tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from dear.bench.ablations import Study, Variant
from dear.bench.cells import Cell, Data, draw_path, resolve_defaults
from dear.bench.protocols import Protocol
from dear.bench.protocols.base_to_novel import BaseToNovel
from dear.bench.protocols.few_shot import FewShot
from dear.bench.protocols.held_out import HeldOutDomain
from dear.bench.protocols.transfer import CROSS_DATASET, DOMAIN_SHIFT
from dear.data.names import check_template
from dear.data.unreadable import check_images
from dear.errors import DearError, RoleError, UsageError
from dear.heads.roles import RoleMap
from dear.heads.rules import derive_roles
from dear.methods import find_method
from dear.methods.base import Method
from dear.runs.spec import Spec, data_digest, digest, roles_digest
from dear.utils.text import unknown_name

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (BaseToNovel(), FewShot(), CROSS_DATASET, DOMAIN_SHIFT, HeldOutDomain())
}
"""Every protocol by name."""


def find_protocol(name: str) -> Protocol:
    """A protocol by name."""
    if name not in PROTOCOLS:
        raise UsageError(unknown_name("protocol", name, PROTOCOLS))
    return PROTOCOLS[name]


@dataclass(frozen=True)
class Request:
    """The methods, datasets, seeds and settings of a grid."""

    backbone: str  #: name, for people
    identity: str  #: of the backbone, see `Clip.identity`
    roles: RoleMap | None = None  #: to start from; None where no method needs one
    methods: Sequence[str] = ()  #: METHOD takes the recommended preset, METHOD@PRESET another
    datasets: Sequence[str] = ()  #: to train on
    seeds: Sequence[int] = (1, 2, 3)  #: one cell each
    shots: Sequence[int] | None = None  #: images per class; None: the protocol's own
    targets: Sequence[str] | None = None  #: datasets to test on (cross-dataset, domain shift)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  #: by method
    recipe: Mapping[str, Any] = field(default_factory=dict)  #: changes of the training recipe, for all
    templates: Mapping[str, str] = field(default_factory=dict)  #: by dataset, where it is not its own
    data_root: str | None = None  #: where benchmark datasets are kept
    draws: str | None = None  #: folder of imported few-shot draws; None: they are drawn
    #: the rest of every training, as in `dear adapt`, without calibration
    training: Spec = field(default_factory=lambda: Spec(calibrate=False))

    def options_of(self, method: str) -> Mapping[str, Any]:
        """Options for a method; upper and lower case are the same."""
        options = {name.lower(): values for name, values in self.options.items()}
        return options.get(method.lower(), {})

    def check(self, methods: Sequence[str]) -> None:
        """Refuse options and templates that would have no effect."""
        planned = {_method(name)[0].name.lower() for name in methods}
        for name in self.options:
            if name.lower() not in planned:
                raise UsageError(
                    f"options must be for planned methods, got {name!r}; planned: "
                    f"{', '.join(sorted(planned))}"
                )
        for dataset, template in self.templates.items():
            if dataset not in self.datasets:
                raise UsageError(
                    f"templates must be for planned datasets, got {dataset!r}; planned: "
                    f"{', '.join(self.datasets) or 'none'}"
                )
            check_template(template)
        if "seed" in self.recipe:
            raise UsageError("the recipe must not contain a seed; use seeds, one cell each")


def plan(protocol: str, request: Request) -> list[Cell]:
    """The cells of a protocol, in the order in which tables show them."""
    chosen = find_protocol(protocol)
    for name in ("methods", "seeds"):
        if not getattr(request, name):
            raise UsageError(f"{name} must have at least one entry, got none")
    request.check(request.methods)
    shots = chosen.shots if request.shots is None else tuple(request.shots)
    methods = [_method(name) for name in request.methods]
    return _Planner(chosen, request).cells(methods, shots)


def plan_study(study: Study, request: Request) -> list[tuple[Variant, list[Cell]]]:
    """The cells of an ablation: for each variant those of all datasets and seeds.

    They are cells of the base-to-novel protocol, so what two studies share is computed once.
    """
    chosen = find_protocol(study.protocol)
    request.check([study.method])
    kind = find_method(study.method)
    shots = chosen.shots if request.shots is None else tuple(request.shots)
    if len(shots) > 1:
        raise UsageError(f"shots must be one number for a study, got {', '.join(map(str, shots))}")
    planner = _Planner(chosen, request)
    return [(variant, planner.cells([(kind, variant)], shots)) for variant in study.variants]


def _method(name: str) -> tuple[type[Method], Variant]:
    """The class of METHOD or METHOD@PRESET, and the preset."""
    method, _, preset = name.partition("@")
    kind = find_method(method)
    kind.preset(preset or None)
    return kind, Variant(name, preset=preset or kind.recommended())


class _Planner:
    """Makes the cells of a protocol; images are opened and hashed once for all cells that share them."""

    def __init__(self, protocol: Protocol, request: Request) -> None:
        self.protocol, self.request = protocol, request
        self._trained: dict[str, dict[str, Any]] = {}
        self._tested: dict[str, str] = {}

    def cells(self, methods: Sequence[tuple[type[Method], Variant]], shots: Sequence[int]) -> list[Cell]:
        """The cells of all datasets, methods, shots and seeds."""
        return [
            self.cell(kind, dataset, seed, count, setting, variant)
            for dataset, setting in self.protocol.settings(self.request)
            for kind, variant in methods
            for count in shots
            for seed in self.request.seeds
        ]

    def cell(
        self,
        kind: type[Method],
        dataset: str,
        seed: int,
        shots: int,
        setting: Mapping[str, Any],
        variant: Variant,
    ) -> Cell:
        """One cell with the method's options and the recipe written out in full."""
        request = self.request
        extra = dict(setting)
        if dataset in request.templates:
            extra["template"] = request.templates[dataset]
        data = Data(dataset, extra, seed, request.templates.get(dataset), request.data_root)
        derivation = variant.roles.format(seed=seed) if kind.uses_roles else ""
        focus = request.training.focus if kind.can_focus else None
        spec = msgspec.structs.replace(
            request.training,
            method=kind.name,
            preset=variant.preset,
            options={**request.options_of(kind.name), **variant.options},
            recipe={**request.recipe, **variant.recipe},
            seed=seed,
            shots=shots,
            data=dataset,
            backbone=request.backbone,
            identity=request.identity,
            roles_digest=self._roles(kind.name, derivation) if kind.uses_roles or focus is not None else None,
            focus=focus,
            **self._training(data, shots),
        )
        return Cell(
            protocol=self.protocol.name,
            spec=resolve_defaults(spec),
            setting=extra,
            roles=derivation,
            tested=self._testing(data),
        )

    def _roles(self, method: str, derivation: str) -> str:
        """The hash of the role map of a cell: the grid's, changed as `derivation` says."""
        if self.request.roles is None:
            raise RoleError(
                f"the method {method!r} needs a role map of {self.request.backbone}; compute one with "
                "discover_roles",
                hint="roles",
            )
        return roles_digest(
            derive_roles(self.request.roles, derivation) if derivation else self.request.roles
        )

    def _training(self, data: Data, shots: int) -> dict[str, Any]:
        """The fields of a Spec about the training images; none where they cannot be opened here."""
        imported = None
        if self.request.draws is not None:
            if not shots:
                raise UsageError(
                    "draws must not be set with shots = 0, which takes all images; leave one of them out"
                )
            imported = draw_path(self.request.draws, data.dataset, shots, data.seed)
        key = digest([asdict(data), shots])
        if key not in self._trained:
            try:
                drawn = self.protocol.training(data).draw(shots, data.seed, imported)
                drawn = (
                    check_images(drawn, "skip").kept if self.request.training.unreadable == "skip" else drawn
                )
                self._trained[key] = {
                    "dataset": drawn.name,
                    "classes": drawn.classes,
                    "template": drawn.template,
                    "images": len(drawn),
                    "data_digest": data_digest(drawn),
                }
            except DearError:  # computing the cell says what is wrong
                self._trained[key] = {}
        return self._trained[key]

    def _testing(self, data: Data) -> str:
        """The hash of the images that are tested on; empty where they cannot be opened here."""
        key = digest(asdict(replace(data, seed=data.seed if self.protocol.tests_by_seed else 0)))
        if key not in self._tested:
            try:
                digests = [data_digest(images) for images in self.protocol.testing(data)]
                self._tested[key] = digest(digests)[:16]
            except DearError:
                self._tested[key] = ""
        return self._tested[key]
