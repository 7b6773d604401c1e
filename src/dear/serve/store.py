"""The adapters of a runs folder: loaded at their first request, replaced when their run changes.

A finished run in the folder is an adapter with the folder's name. The folder is scanned regularly: a
new run is served without a restart, a changed one replaces the old between two batches, and one that cannot
be read is refused while the old one stays.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dear.clip.model import Clip
from dear.errors import DearError, RunError
from dear.methods.base import Method
from dear.methods.class_rows import ClassRows
from dear.runs.folder import FILES, REQUIRED_FILES, read_config, read_metrics
from dear.runs.model import Model
from dear.serve.engine import Answerer
from dear.serve.errors import Refused
from dear.utils.digest import of_parts

_MOST_CLASSES = 50_000  # of a run
_MOST_FIGURE_BYTES = 20_000  # of a run's evaluations in a listing
_RETRY_SECONDS = 30.0  # after which a run that could not be loaded is tried again
_MISSING_SECONDS = 0.2  # that a run must be missing; one that is being exchanged is there again sooner
_RETRY_DELAYS = (0.05, 0.1, 0.2, 0.4, 0.0)  # seconds after failed attempts to load an adapter


@dataclass(frozen=True)
class Card:
    """Facts about an adapter that are known without loading it."""

    name: str
    version: str  #: changes when a file of the run changes
    method: str
    classes: tuple[str, ...]
    body: bytes  #: JSON for clients (`schemas.ModelCard`)
    kind: str  #: adapters of one kind differ in learned values alone: recorded batches serve all of them


class Adapter:
    """A loaded adapter. It never changes: a changed run is another adapter."""

    def __init__(self, card: Card, model: Model) -> None:
        self.card, self.model = card, model
        self.answerer = Answerer(model)
        self.names = frozenset(card.classes)
        self.prepared = False  #: whether the texts of its classes are encoded
        self.preparing: asyncio.Task[None] | None = None
        self.rows: ClassRows | None = None  #: of its classes

    @property
    def method(self) -> Method:
        """The method in the service's precision."""
        return self.answerer.method

    def on_classes(self, classes: tuple[str, ...]) -> Answerer:
        """The adapter on other classes, whose texts are still to be encoded; it shares what was learned."""
        try:
            model = self.model.with_classes(classes)
        except DearError as error:
            raise Refused(400, str(error)) from error
        model.method.share_learned(self.model.method)
        return Answerer(model)


class AdapterStore:
    """The runs of a folder as adapters of one backbone; the least recently used make room for others."""

    def __init__(self, folder: Path, clip: Clip, most_loaded: int = 1000, precision: str = "auto") -> None:
        if not folder.is_dir():
            raise RunError(f"{folder}: must be a folder of run folders")
        self.folder, self.clip, self.most_loaded, self.precision = folder, clip, most_loaded, precision
        self._cards: dict[str, Card] = {}
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()
        self._problems: dict[str, str] = {}
        self._unloaded: set[str] = set()
        self._lock = threading.RLock()
        self._loading: dict[str, threading.Lock] = {}
        self._failed: dict[str, tuple[str, float]] = {}  # version that could not be loaded, and until when

    # -- lookup ------------------------------------------------------------------------------------

    def cards(self) -> list[Card]:
        """All adapters, by name."""
        with self._lock:
            return [self._cards[name] for name in sorted(self._cards)]

    def problems(self) -> dict[str, str]:
        """Run folders that are not served as they are now, with the reason."""
        with self._lock:
            return dict(self._problems)

    @property
    def loaded(self) -> int:
        """How many adapters are ready on the device."""
        return len(self._loaded)

    def card(self, name: str) -> Card:
        """One adapter."""
        with self._lock:
            if name in self._cards:
                return self._cards[name]
            known = name in self._problems
        if known:
            raise _cannot_be_served(name)
        raise Refused(404, f"no adapter {name[:100]!r}; /v1/models lists them")

    def one_of_each_kind(self, most: int) -> list[Adapter]:
        """A loaded adapter of each of the `most` most frequent kinds."""
        cards = self.cards()
        adapters = []
        for kind, _ in Counter(card.kind for card in cards).most_common(most):
            with suppress(Refused):
                adapters.append(self.get(next(card.name for card in cards if card.kind == kind)))
        return adapters

    # -- the folder -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Scan the folder for new, changed and removed runs."""
        runs = {path.name: path for path in sorted(self.folder.iterdir()) if is_run(path)}
        with self._lock:
            missing = [name for name in {*self._cards, *self._problems} if name not in runs]
        if missing:
            time.sleep(_MISSING_SECONDS)
        with self._lock:
            for name in missing:
                if not is_run(self.folder / name):
                    self._remove(name)
                    self._problems.pop(name, None)
            self._unloaded &= set(runs)
        for name, path in runs.items():
            if name not in self._unloaded:
                self._update(name, path)

    def _update(self, name: str, path: Path) -> None:
        """Serve a run that is new or has changed."""
        try:
            version = run_version(path)
            with self._lock:
                known = self._cards.get(name)
                if known is not None and known.version == version:
                    self._problems.pop(name, None)
                    return
                ready = name in self._loaded
            card = self.read_card(name, path, version)
            adapter = self.load_adapter(card, path) if known is not None and ready else None
        except (DearError, OSError) as error:
            with self._lock:
                self._problems[name] = self._describe(error)
            return
        self.publish(card, adapter)

    def publish(self, card: Card, adapter: Adapter | None = None) -> None:
        """Serve a run from now on; requests in flight keep the adapter they began with."""
        with self._lock:
            self._unloaded.discard(card.name)
            self._cards[card.name] = card
            self._problems.pop(card.name, None)
            self._loaded.pop(card.name, None)  # of the run before it
            if adapter is not None:
                self._add_loaded(adapter)

    def _add_loaded(self, adapter: Adapter) -> None:
        self._loaded[adapter.card.name] = adapter
        while len(self._loaded) > self.most_loaded:
            self._loaded.popitem(last=False)

    def read_card(self, name: str, path: Path, version: str) -> Card:
        """Facts about a run that are known without loading it."""
        config, metrics = read_config(path), read_metrics(path)
        if config.identity != self.clip.identity:
            raise RunError(f"{path}: was trained on {config.backbone}, not on {self.clip.name}")
        classes = tuple(config.classes)
        if len(classes) > _MOST_CLASSES:
            raise RunError(f"{path}: a run may have {_MOST_CLASSES:,} classes, got {len(classes):,}")
        repeated = [name for name, count in Counter(classes).items() if count > 1]
        if repeated:
            raise RunError(f"{path / 'config.json'}: classes must differ, got {repeated[0]!r} twice")
        correction = config.correction
        kind = repr((
            config.method, sorted(config.options.items()), config.roles_digest,
            correction and correction.get("heads"),
        ))  # fmt: skip
        trained = _training_date(path, metrics)
        body = {
            "id": name, "object": "model", "created": int(trained.timestamp()), "owned_by": "dear",
            "trained": trained.isoformat(timespec="seconds"), "version": version, "method": config.method,
            "classes": classes, "labels": "several" if config.several else "one", "tree": config.tree,
            "figures": _figures(metrics),
        }  # fmt: skip
        return Card(name, version, config.method, classes, msgspec.json.encode(body), kind)

    def load_adapter(self, card: Card, path: Path) -> Adapter:
        """The adapter of a run, which must still be the run of the card when it is loaded."""
        model = Model.load(path, self.clip, precision=self.precision)
        if run_version(path) != card.version:
            raise RunError(f"{path}: changed while it was read")
        return Adapter(card, model)

    def _remove(self, name: str) -> None:
        self._cards.pop(name, None)
        self._loaded.pop(name, None)
        self._failed.pop(name, None)

    # -- adapters ---------------------------------------------------------------------------------

    def get(self, name: str) -> Adapter:
        """The adapter, loaded; the first time this may take a while."""
        with self._lock:
            loading = self._loading.setdefault(name, threading.Lock())
        with loading:  # two requests for one adapter load it once
            error: Exception | None = None
            for delay in _RETRY_DELAYS:
                card = self.card(name)
                adapter = self.ready(name)
                if adapter is not None:
                    return adapter
                version, until = self._failed.get(name, ("", 0.0))
                if version == card.version and time.monotonic() < until:
                    raise _cannot_be_served(name)
                try:
                    adapter = self.load_adapter(card, self.folder / name)
                    with self._lock:
                        if self._cards.get(name) is card:  # else its run was replaced meanwhile
                            self._add_loaded(adapter)
                            return adapter
                except (DearError, OSError) as failure:
                    error = failure
                time.sleep(delay)  # a run that is being replaced is there again in a moment
                if is_run(self.folder / name):
                    self._update(name, self.folder / name)
            with self._lock:
                self._problems[name] = self._describe(error or RunError("changed while it was read"))
                self._failed[name] = (card.version, time.monotonic() + _RETRY_SECONDS)
            raise _cannot_be_served(name) from error

    def _describe(self, error: Exception) -> str:
        """An error's sentence without the place of the folder on this machine."""
        return str(error).replace(f"{self.folder}{os.sep}", "")

    def ready(self, name: str) -> Adapter | None:
        """The adapter if it is loaded, marked as used."""
        with self._lock:
            card, adapter = self.card(name), self._loaded.get(name)
            if adapter is None or adapter.card.version != card.version:
                return None
            self._loaded.move_to_end(name)
            return adapter

    def unload(self, name: str) -> None:
        """Stop serving an adapter until `load`; its run stays in the folder."""
        self.card(name)
        with self._lock:
            self._unloaded.add(name)
            self._remove(name)

    def load(self, name: str) -> Adapter:
        """Serve an adapter (again), loaded at once."""
        with self._lock:
            self._unloaded.discard(name)
            self._failed.pop(name, None)
        path = self.folder / name
        if not is_run(path):
            raise Refused(404, f"the runs folder has no finished run {name!r}")
        self._update(name, path)
        return self.get(name)


def _cannot_be_served(name: str) -> Refused:
    return Refused(409, f"adapter {name!r} cannot be served; the log of the service has the reason")


def _training_date(path: Path, metrics: Mapping[str, Any]) -> datetime:
    """When a run was trained: as it says itself, else when its tensors were written."""
    with suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(metrics["trained"]).astimezone(UTC)
    return datetime.fromtimestamp((path / "adapter.safetensors").stat().st_mtime, UTC)


def _figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluations among a run's metrics, as many as fit into a listing."""
    figures: dict[str, Any] = {}
    size = 0
    for key, value in metrics.items():
        if key.startswith("evaluation of "):
            size += len(json.dumps({key: value}))
            if size > _MOST_FIGURE_BYTES:
                break
            figures[key] = value
    return figures


def is_run(path: Path) -> bool:
    """Whether a folder holds a finished run; hidden ones are being written."""
    return not path.name.startswith(".") and all((path / name).is_file() for name in REQUIRED_FILES)


def run_version(path: Path) -> str:
    """The date of a run's newest file and a digest that changes when a file does: 2026-11-18-3fa9c1d2."""
    names = [name for name in FILES if name != "log.jsonl" and (path / name).is_file()]
    if not names:  # a run that was removed a moment ago
        raise RunError(f"{path}: must have the files of a run, got none")
    stamps = [(path / name).stat() for name in names]
    words = [f"{name} {stamp.st_mtime_ns} {stamp.st_size}" for name, stamp in zip(names, stamps, strict=True)]
    newest = datetime.fromtimestamp(max(stamp.st_mtime for stamp in stamps), UTC)
    return f"{newest:%Y-%m-%d}-{of_parts(' '.join(words)).hex()[:8]}"
