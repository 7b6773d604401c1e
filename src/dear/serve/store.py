"""The adapters of a runs folder: found, loaded when they are asked for, exchanged when they change.

A finished run in the folder is an adapter with the folder's name. The folder is scanned regularly: a
new run is served without a restart, a changed one replaces the old between two batches, and one that cannot
be read is refused with an error message while the old one stays.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dear.clip.model import Clip
from dear.errors import DearError, RunError
from dear.methods.base import Method, in_precision
from dear.runs.folder import CALIBRATION, CORRECTION, REQUIRED_FILES, load_run, read_config, read_metrics
from dear.serve.errors import Refused

_MOST_CLASS_LISTS = 64  # per adapter: lists of other classes whose texts are kept


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

    def __init__(self, card: Card, method: Method) -> None:
        self.card = card
        self.method = method
        self._others: OrderedDict[tuple[str, ...], Method] = OrderedDict()
        self._lock = threading.Lock()

    def on_classes(self, classes: tuple[str, ...] | None) -> Method:
        """The method on other classes; texts of recent lists are kept.

        Raises:
            Refused: the method cannot name these classes.
        """
        if classes is None or classes == self.method.classes:
            return self.method
        with self._lock:
            if classes in self._others:
                self._others.move_to_end(classes)
                return self._others[classes]
        try:
            other = self.method.with_classes(classes)
        except DearError as error:
            raise Refused(400, str(error)) from error
        with self._lock:
            self._others[classes] = other
            while len(self._others) > _MOST_CLASS_LISTS:
                self._others.popitem(last=False)
        return other


class AdapterStore:
    """The runs of a folder as adapters of one backbone.

    Args:
        folder: holds a run folder per adapter.
        clip: the backbone, on its device.
        most_loaded: adapters kept loaded; the least recently used one makes room.
        precision: of the backbone's matrices.
    """

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
        """One adapter.

        Raises:
            Refused: there is none of that name.
        """
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
        found = {path.name: path for path in sorted(self.folder.iterdir()) if _is_run(path)}
        with self._lock:
            for name in [name for name in self._cards if name not in found]:
                self._forget(name)
            for name in [name for name in self._problems if name not in found]:
                del self._problems[name]
            self._unloaded &= set(found)
        for name, path in found.items():
            if name not in self._unloaded:
                self._look(name, path)

    def _look(self, name: str, path: Path) -> None:
        """Take over a run that is new or has changed."""
        try:
            version = _version(path)
            with self._lock:
                known = self._cards.get(name)
            if known is not None and known.version == version:
                self._problems.pop(name, None)
                return
            card = self._read_card(name, path, version)
            adapter = self._load(card, path) if known is not None and name in self._loaded else None
        except (DearError, OSError) as error:
            with self._lock:
                self._problems[name] = str(error)
            return
        with self._lock:
            self._cards[name] = card
            self._problems.pop(name, None)
            if adapter is not None:
                self._loaded[name] = adapter  # requests in flight keep the one they began with

    def _read_card(self, name: str, path: Path, version: str) -> Card:
        config, metrics = read_config(path), read_metrics(path)
        if config.fingerprint != self.clip.fingerprint:
            raise RunError(f"{path}: was trained on {config.backbone}, not on {self.clip.name}")
        figures: dict[str, Any] = {
            key: value for key, value in metrics.items() if key.startswith("evaluation of ")
        }
        when = datetime.fromtimestamp((path / "adapter.safetensors").stat().st_mtime, timezone.utc)
        classes = tuple(config.classes)
        change = config.correction
        kind = repr((
            config.method, sorted(config.options.items()), config.roles_digest, change and change.get("heads")
        ))  # fmt: skip
        return Card(name, version, config.method, classes, when.isoformat(timespec="seconds"), figures, kind)

    def _load(self, card: Card, path: Path) -> Adapter:
        method = load_run(path, self.clip)
        if _version(path) != card.version:
            raise RunError(f"{path}: changed while it was read")
        bound = in_precision(method, self.precision)
        return Adapter(card, bound)

    def _forget(self, name: str) -> None:
        self._cards.pop(name, None)
        self._loaded.pop(name, None)

    # -- adapters ---------------------------------------------------------------------------------

    def get(self, name: str) -> Adapter:
        """The adapter, loaded; this may take a while the first time.

        Raises:
            Refused: there is none of that name, or it cannot be loaded.
        """
        card = self.card(name)
        with self._lock:
            adapter = self._loaded.get(name)
            if adapter is not None:
                self._loaded.move_to_end(name)
                return adapter
            gate = self._loading.setdefault(name, threading.Lock())
        with gate:  # two requests for one adapter load it once
            with self._lock:
                if name in self._loaded:
                    return self._loaded[name]
            try:
                adapter = self._load(card, self.folder / name)
            except (DearError, OSError) as error:
                with self._lock:
                    self._problems[name] = str(error)
                raise Refused(409, f"the adapter {name!r} cannot be served: {error}") from error
            with self._lock:
                self._loaded[name] = adapter
                while len(self._loaded) > self.most_loaded:
                    self._loaded.popitem(last=False)
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
        path = self.folder / name
        if not _is_run(path):
            raise Refused(404, f"the runs folder holds no finished run called {name!r}")
        self._look(name, path)
        return self.get(name)


def _is_run(path: Path) -> bool:
    """Whether a folder holds a finished run; hidden ones are being written."""
    return not path.name.startswith(".") and all((path / name).is_file() for name in REQUIRED_FILES)


def _version(path: Path) -> str:
    """A word that changes when the run's files do."""
    stamps = [
        (path / name).stat() for name in (*REQUIRED_FILES, CORRECTION, CALIBRATION) if (path / name).is_file()
    ]
    return "-".join(f"{stamp.st_mtime_ns:x}.{stamp.st_size:x}" for stamp in stamps)
