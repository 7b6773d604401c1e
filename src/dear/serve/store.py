"""The adapters of a runs folder: found, loaded when they are asked for, exchanged when they change.

A finished run in the folder is an adapter with the folder's name. The folder is scanned regularly: a
new run is served without a restart, a changed one replaces the old between two batches, and one that cannot
be read is refused with an error message while the old one stays.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dear.clip.model import Clip
from dear.errors import DearError, RunError
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.runs.folder import FILES, REQUIRED_FILES, read_config, read_metrics
from dear.runs.model import Model
from dear.serve.engine import Answerer
from dear.serve.errors import Refused
from dear.serve.texts import Rows

_MOST_CLASSES = 50_000  # of a run
_MOST_FIGURE_BYTES = 20_000  # of a run's evaluations in a listing
_RETRY_SECONDS = 30.0  # after which a run that could not be loaded is tried again
_GONE_SECONDS = 0.2  # that a run must be missing; one that is being exchanged is there again sooner
_PATIENCE = (0.05, 0.1, 0.2, 0.4, 0.0)  # seconds after failed attempts to load an adapter


@dataclass(frozen=True)
class Card:
    """What can be told of an adapter without loading it."""

    name: str
    version: str  #: changes when a file of the run changes
    method: str
    classes: tuple[str, ...]
    trained: str  #: when, ISO 8601
    figures: Mapping[str, Any]  #: of the evaluations that the run's folder holds
    kind: str  #: adapters of one kind differ in learned values alone: recorded batches serve all of them


class Adapter:
    """A loaded adapter. It never changes: a changed run is another adapter."""

    def __init__(self, card: Card, model: Model) -> None:
        self.card, self.model = card, model
        self.answerer = Answerer(model)
        self.names = frozenset(card.classes)
        self.prepared = False  #: whether the texts of its classes are encoded
        self.preparing: asyncio.Task[None] | None = None
        self.rows: Rows | None = None  #: what is known of them

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
        source, method = self.model.method, model.method
        method.load_state_dict(source.state_dict(), assign=True)
        if isinstance(source, DeAR) and isinstance(method, DeAR):
            method.masks = source.masks  # about 1 MB per list once they are expanded
        return Answerer(model)


class AdapterStore:
    """The runs of a folder as adapters of one backbone; the least recently used make room for others."""

    def __init__(self, folder: Path, clip: Clip, most_loaded: int = 1000, precision: str = "auto") -> None:
        if not folder.is_dir():
            raise RunError(f"{folder}: is not a folder; name one that holds run folders")
        self.folder, self.clip, self.most_loaded, self.precision = folder, clip, most_loaded, precision
        self._cards: dict[str, Card] = {}
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()
        self._problems: dict[str, str] = {}
        self._unloaded: set[str] = set()
        self._lock = threading.RLock()
        self._loading: dict[str, threading.Lock] = {}
        self._failed: dict[str, tuple[str, float]] = {}  # version that could not be loaded, and until when

    # -- what is there ----------------------------------------------------------------------------

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
            reason = self._problems.get(name)
        if reason is not None:
            raise Refused(409, f"the adapter {name!r} cannot be served: {reason}")
        raise Refused(404, f"no adapter is called {name!r}")

    def one_of_each_kind(self, most: int) -> list[Adapter]:
        """An adapter of each of the most frequent kinds, loaded; those that cannot be loaded are problems."""
        cards = self.cards()
        found = []
        for kind, _ in Counter(card.kind for card in cards).most_common(most):
            with suppress(Refused):
                found.append(self.get(next(card.name for card in cards if card.kind == kind)))
        return found

    # -- the folder -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the folder: new, changed and removed runs."""
        found = {path.name: path for path in sorted(self.folder.iterdir()) if is_run(path)}
        with self._lock:
            gone = [name for name in {*self._cards, *self._problems} if name not in found]
        if gone:
            time.sleep(_GONE_SECONDS)
        with self._lock:
            for name in gone:
                if not is_run(self.folder / name):
                    self._forget(name)
                    self._problems.pop(name, None)
            self._unloaded &= set(found)
        for name, path in found.items():
            if name not in self._unloaded:
                self._look(name, path)

    def _look(self, name: str, path: Path) -> None:
        """Take over a run that is new or has changed."""
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
                self._problems[name] = str(error)
            return
        self.take(card, adapter)

    def take(self, card: Card, adapter: Adapter | None = None) -> None:
        """Serve a run from now on; requests in flight keep the adapter they began with."""
        with self._lock:
            self._unloaded.discard(card.name)
            self._cards[card.name] = card
            self._problems.pop(card.name, None)
            self._loaded.pop(card.name, None)  # of the run before it
            if adapter is not None:
                self._keep(adapter)

    def _keep(self, adapter: Adapter) -> None:
        self._loaded[adapter.card.name] = adapter
        while len(self._loaded) > self.most_loaded:
            self._loaded.popitem(last=False)

    def read_card(self, name: str, path: Path, version: str) -> Card:
        """What can be told of a run without loading it."""
        config, metrics = read_config(path), read_metrics(path)
        if config.identity != self.clip.identity:
            raise RunError(f"{path}: was trained on {config.backbone}, not on {self.clip.name}")
        if len(config.classes) > _MOST_CLASSES:
            raise RunError(f"{path}: has {len(config.classes):,} classes; {_MOST_CLASSES:,} can be served")
        when = datetime.fromtimestamp((path / "adapter.safetensors").stat().st_mtime, UTC)
        classes = tuple(config.classes)
        change = config.correction
        kind = repr((
            config.method, sorted(config.options.items()), config.roles_digest, change and change.get("heads")
        ))  # fmt: skip
        trained = when.isoformat(timespec="seconds")
        return Card(name, version, config.method, classes, trained, _figures(metrics), kind)

    def load_adapter(self, card: Card, path: Path) -> Adapter:
        """The adapter of a run, which must still be the run of the card when it is loaded."""
        model = Model.load(path, self.clip, precision=self.precision)
        if run_version(path) != card.version:
            raise RunError(f"{path}: changed while it was read")
        return Adapter(card, model)

    def _forget(self, name: str) -> None:
        self._cards.pop(name, None)
        self._loaded.pop(name, None)
        self._failed.pop(name, None)

    # -- adapters ---------------------------------------------------------------------------------

    def get(self, name: str) -> Adapter:
        """The adapter, loaded; this may take a while the first time."""
        with self._lock:
            gate = self._loading.setdefault(name, threading.Lock())
        reason: Exception | None = None
        for patience in _PATIENCE:
            if (adapter := self._ready(self.card(name))) is not None:
                return adapter
            with gate:  # two requests for one adapter load it once
                card = self.card(name)
                if (adapter := self._ready(card)) is not None:
                    return adapter
                failed, until = self._failed.get(name, ("", 0.0))
                if failed == card.version and time.monotonic() < until:
                    raise Refused(409, f"the adapter {name!r} cannot be served: {self._problems.get(name)}")
                try:
                    adapter = self.load_adapter(card, self.folder / name)
                except (DearError, OSError) as error:
                    reason = error
                else:
                    with self._lock:
                        if self._cards.get(name) is card:  # else the run was exchanged meanwhile
                            self._keep(adapter)
                            return adapter
                        reason = RunError(f"{self.folder / name}: changed while it was read")
            time.sleep(patience)  # a run that is being exchanged is there again in a moment
            if is_run(self.folder / name):
                self._look(name, self.folder / name)
        with self._lock:
            self._problems[name] = str(reason)
            self._failed[name] = (card.version, time.monotonic() + _RETRY_SECONDS)
        raise Refused(409, f"the adapter {name!r} cannot be served: {reason}") from reason

    def ready(self, name: str) -> Adapter | None:
        """The adapter if it is loaded."""
        return self._ready(self.card(name))

    def _ready(self, card: Card) -> Adapter | None:
        """The loaded adapter of a card, marked as used."""
        with self._lock:
            adapter = self._loaded.get(card.name)
            if adapter is None or adapter.card.version != card.version:
                return None
            self._loaded.move_to_end(card.name)
            return adapter

    def unload(self, name: str) -> None:
        """Stop serving an adapter until `load`; its run stays in the folder."""
        self.card(name)
        with self._lock:
            self._unloaded.add(name)
            self._forget(name)

    def load(self, name: str) -> Adapter:
        """Serve an adapter (again), loaded at once."""
        with self._lock:
            self._unloaded.discard(name)
            self._failed.pop(name, None)
        path = self.folder / name
        if not is_run(path):
            raise Refused(404, f"the runs folder holds no finished run called {name!r}")
        self._look(name, path)
        return self.get(name)


def _figures(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluations among a run's metrics, as many as fit into a listing."""
    found: dict[str, Any] = {}
    left = _MOST_FIGURE_BYTES
    for key, value in metrics.items():
        if key.startswith("evaluation of "):
            left -= len(json.dumps({key: value}))
            if left < 0:
                break
            found[key] = value
    return found


def is_run(path: Path) -> bool:
    """Whether a folder holds a finished run; hidden ones are being written."""
    return not path.name.startswith(".") and all((path / name).is_file() for name in REQUIRED_FILES)


def run_version(path: Path) -> str:
    """A word that changes when the run's files do."""
    names = [name for name in FILES if name != "log.jsonl" and (path / name).is_file()]
    stamps = [(path / name).stat() for name in names]
    return "-".join(f"{stamp.st_mtime_ns:x}.{stamp.st_size:x}" for stamp in stamps)
