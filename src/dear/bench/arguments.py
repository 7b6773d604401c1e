"""From the arguments of `dear.bench.run` to a request: names, numbers, options and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dear.bench.cells import Environment
from dear.bench.plan import Request
from dear.bench.session import backbone as open_backbone
from dear.bench.session import starting_roles
from dear.clip.factory import pick_device
from dear.data.open import find_benchmark
from dear.errors import UsageError
from dear.methods import find_method
from dear.utils.files import PathLike
from dear.utils.pairs import parse_pairs, split_names

Names = str | Sequence[str]  #: as a list, or as a text with commas
Numbers = str | Sequence[int]


def read_names(texts: Names | None) -> list[str]:
    """Names, as a list or as a text with commas."""
    return split_names(texts) if isinstance(texts, str) else list(texts or ())


def read_numbers(texts: Numbers, name: str) -> list[int]:
    """Whole numbers from 0, as a list or as a text with commas."""
    try:
        numbers = [int(part) for part in (split_names(texts) if isinstance(texts, str) else texts)]
    except ValueError:
        raise UsageError(f"{name} must be whole numbers separated by commas, got {texts!r}") from None
    if not numbers or min(numbers) < 0:
        raise UsageError(f"{name} must have at least one number, none below 0, got {texts!r}")
    return numbers


def read_datasets(texts: Names | None) -> list[str]:
    """Datasets; paths become absolute, since workers start elsewhere."""
    return [
        str(Path(name).resolve()) if find_benchmark(name) is None and Path(name).exists() else name
        for name in read_names(texts)
    ]


def _path(name: PathLike) -> str:
    return str(Path(name).expanduser().resolve())


def with_preset(methods: Sequence[str], preset: str | None) -> list[str]:
    """The methods, each that has the preset with it: METHOD@PRESET."""
    if preset is None:
        return list(methods)
    has = {name: "@" not in name and preset in find_method(name).presets for name in methods}
    if not any(has.values()):
        raise UsageError(f"recipe {preset!r}: none of the methods ({', '.join(methods)}) has this preset")
    return [f"{name}@{preset}" if has[name] else name for name in methods]


def read_environment(
    backbone: str,
    roles: str | None,
    device: str,
    data_root: PathLike | None,
    draws: PathLike | None,
    threads: int,
) -> Environment:
    """Where cells are computed; paths become absolute, since workers start elsewhere."""
    if threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    return Environment(
        backbone=_path(backbone) if Path(backbone).exists() else backbone,
        data_root=None if data_root is None else _path(data_root),
        roles_file=roles if roles is None or roles == "table2" else _path(roles),
        device=pick_device(device),
        threads=threads,
        draws=None if draws is None else _path(draws),
    )


def read_request(
    environment: Environment,
    methods: Sequence[str],
    datasets: Names | None,
    seeds: Numbers,
    shots: Numbers | None,
    options: Mapping[str, Any] | Sequence[str] | None,
    recipe: Mapping[str, Any],
    templates: Mapping[str, str] | Sequence[str] | None,
) -> Request:
    """The request; wrong use is refused before the backbone is loaded."""
    roles = environment.roles_file
    if roles is not None and not any(find_method(name.partition("@")[0]).uses_roles for name in methods):
        raise UsageError(f"roles {roles}: none of the methods ({', '.join(methods)}) uses roles")
    by_method: dict[str, dict[str, Any]] = {}
    for name, value in parse_pairs(options, "options").items():
        method, dot, option = name.partition(".")
        if not dot:
            raise UsageError(f"options must be METHOD.OPTION=VALUE (dear.beta=0.8), got {name}={value}")
        by_method.setdefault(method.lower(), {})[option] = value
    typed = templates.items() if isinstance(templates, Mapping) else _template_pairs(templates or ())
    seed_numbers = read_numbers(seeds, "seeds")
    shot_numbers = None if shots is None else read_numbers(shots, "shots")
    clip = open_backbone(environment.backbone, environment.device)
    return Request(
        backbone=clip.name,
        identity=clip.identity,
        roles=starting_roles(clip, roles),
        datasets=read_datasets(datasets),
        seeds=seed_numbers,
        shots=shot_numbers,
        options=by_method,
        recipe=recipe,
        templates={read_datasets([name])[0]: value for name, value in typed},
        data_root=environment.data_root,
        draws=environment.draws,
    )


def _template_pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in texts]
    if not all(name and value for name, _, value in pairs):
        raise UsageError(f"template must be DATASET=TEMPLATE, got {', '.join(texts)}")
    return [(name, value) for name, _, value in pairs]
