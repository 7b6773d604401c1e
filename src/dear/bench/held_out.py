"""Leave one domain out: train on the other domains, test on the one that was never seen."""

from __future__ import annotations

from typing import Any

from dear.bench.session import Session
from dear.data.benchmarks import find_benchmark
from dear.data.images import ImageSet, select_domains
from dear.data.split import hold_out
from dear.errors import DataError

VALIDATION = 0.2  #: share of the sources kept for validation


def splits_of(dataset: str) -> tuple[str, str]:
    """(split of the sources, split of the target): DomainBed publishes no split and takes all of both."""
    benchmark = find_benchmark(dataset)
    return ("all", "all") if benchmark is not None and benchmark.domains else ("train", "test")


def domains_of(images: ImageSet) -> tuple[str, ...]:
    """Names of a set's domains, sorted.

    Raises:
        DataError: it has fewer than two.
    """
    names = tuple(sorted(set(images.domains or ())))
    if len(names) < 2:
        raise DataError(f"{images.name}: has no domains to leave one out of; give a dataset with domains")
    return names


def split_sources(images: ImageSet, seed: int) -> tuple[ImageSet, ImageSet]:
    """(training, validation) of the source domains: a fifth of each class of each domain is held back.

    Which images depends on their names and the seed alone.
    """
    keys = [f"{seed}/{images.key(index)}" for index in range(len(images))]
    groups = list(zip(images.labels.tolist(), images.domains or (), strict=True))
    held = hold_out(keys, groups, VALIDATION)
    return (
        images.subset([index for index, out in enumerate(held) if not out]),
        images.subset([index for index, out in enumerate(held) if out]),
    )


def run(session: Session) -> dict[str, Any]:
    """Accuracy on the held-out domain, and on the validation part of the sources, in every mode.

    The target's images are opened after training; nothing of them is used before.
    """
    target = str(session.cell.setting["held_out"])
    from_split, to_split = splits_of(session.cell.dataset)
    whole = session.open(from_split)
    sources = tuple(name for name in domains_of(whole) if name != target)
    training, validation = split_sources(select_domains(whole, sources), session.cell.seed)
    method = session.fit(session.draw(training))
    checked = session.test(method, validation) or {}
    found = session.test(method, select_domains(session.open(to_split), (target,))) or {}
    modes = {mode: {"target": found[mode], "validation": checked[mode]} for mode in found}
    session.record["sources"] = list(sources)
    return session.finish(modes)
