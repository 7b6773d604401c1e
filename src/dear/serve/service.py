"""The service without HTTP: store, queue and decoder, from start to stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError
from dear.methods.base import Method
from dear.methods.calibration import rejection_score, run_threshold
from dear.methods.dear import DeAR
from dear.serve.batcher import Batcher
from dear.serve.decode import Decoder, Upload
from dear.serve.engine import Engine, ImageJob
from dear.serve.errors import Refused
from dear.serve.galleries import Galleries, Match, spaces
from dear.serve.metrics import Metrics
from dear.serve.settings import ServeSettings
from dear.serve.store import Adapter, AdapterStore


class Service:
    """One backbone, any number of adapters, one queue.

    Args:
        folder: holds a run folder per adapter.
        clip: the backbone on its device.
        settings: limits, batching and how many adapters stay loaded.
        galleries: images to search, by name.
    """

    def __init__(
        self,
        folder: Path,
        clip: Clip,
        settings: ServeSettings | None = None,
        galleries: Mapping[str, ImageSet] | None = None,
    ) -> None:
        self.settings = settings = settings or ServeSettings()
        self.clip = clip
        self.metrics = Metrics()
        self.store = AdapterStore(folder, clip, settings.loaded_adapters, settings.precision)
        self.store.refresh()
        size = clip.config.view
        self.decoder = Decoder(settings.decoders, size, settings.limits.pixels, settings.reduced_jpeg)
        self.batcher: Batcher[ImageJob, Tensor] = Batcher(
            Engine(clip, settings.precision).compute,
            settings.largest_batch,
            settings.longest_wait,
            settings.limits.queued_images,
            self.metrics.observe_batch,
        )
        self.galleries = Galleries(galleries or {}, size, self.batcher.submit)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="dear-serve-watch", daemon=True)
        self._watcher.start()

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return not self._stopping.is_set()

    async def adapter(self, name: str) -> Adapter:
        """An adapter, loaded in the background if need be."""
        return await asyncio.get_running_loop().run_in_executor(None, self.store.get, name)

    async def answers(
        self,
        uploads: Sequence[Upload],
        adapter: Adapter | None,
        classes: tuple[str, ...] | None = None,
        reject: float | None = None,
    ) -> tuple[list[Tensor], tuple[str, ...], list[bool]]:
        """Probabilities [C] of each image, the class names, and whether each image is none of them.

        Without an adapter unit features [E]. `reject` is the share of known images that may be refused.

        Raises:
            Refused: an image cannot be read, the queue is full, or the time is up.
        """
        loop = asyncio.get_running_loop()
        method = None
        if adapter is not None:
            method = await loop.run_in_executor(None, adapter.on_classes, classes)
        limit = None
        if method is not None and reject is not None:
            try:
                limit = run_threshold(method, method.pick_mode(None), reject)
            except DearError as error:
                raise Refused(400, str(error)) from None
        with self._in_time():
            found = await self._computed(uploads, method)
        if method is None:
            return found, (), [False] * len(found)
        refused = [limit is not None and _score(method, own) < limit.value for own in found]
        return [own.softmax(dim=-1) for own in found], method.classes, refused

    async def matches(
        self, uploads: Sequence[Upload], adapter: Adapter, gallery: str, attribute: str | None, top: int
    ) -> list[dict[str, list[Match]]]:
        """For each image: the images of a gallery most like it, by space; None asks for every space.

        Raises:
            Refused: the adapter has no such attribute, an image cannot be read, or the time is up.
        """
        names = spaces(adapter.method)
        wanted = names
        if attribute is not None:
            if not isinstance(adapter.method, DeAR):
                raise Refused(
                    400, f"the adapter {adapter.card.name!r} has no features per attribute; leave it out"
                )
            try:
                wanted = (names[adapter.method.attribute_index(attribute)],)
            except DearError as error:
                raise Refused(400, str(error)) from None
        with self._in_time():
            queries = await self._computed(uploads, adapter.method, in_spaces=True)
            features = await self.galleries.features(gallery, adapter)
        found = []
        for query in queries:
            best = dict(zip(names, self.galleries.best(gallery, features, query, top), strict=True))
            found.append({name: best[name] for name in wanted})
        return found

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        seconds = self.settings.limits.seconds
        try:
            with anyio.fail_after(seconds):
                yield
        except TimeoutError:
            raise Refused(503, f"no answer within {seconds:g} seconds; try again", retry_after=1) from None

    async def _computed(
        self, uploads: Sequence[Upload], method: Method | None, in_spaces: bool = False
    ) -> list[Tensor]:
        pixels = await self.decoder.decode(uploads)
        futures = self.batcher.submit([ImageJob(one, method, in_spaces) for one in pixels])
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))

    async def text_features(self, texts: Sequence[str]) -> Tensor:
        """Unit text features [N, E]."""

        @torch.inference_mode()
        def encode() -> Tensor:
            return torch.nn.functional.normalize(self.clip.encode_text(list(texts)).float(), dim=-1).cpu()

        return await asyncio.get_running_loop().run_in_executor(None, encode)

    def update_gauges(self) -> None:
        """Bring the gauges up to date."""
        self.metrics.queued.set(self.batcher.queued)
        self.metrics.adapters.set(len(self.store.cards()))
        self.metrics.loaded.set(self.store.loaded)

    def close(self) -> None:
        """Answer what is queued, then stop all threads."""
        self._stopping.set()
        self.galleries.close()
        self.batcher.close()
        self.decoder.close()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self.settings.poll_seconds):
            try:
                self.store.refresh()
            except OSError:  # the folder is away for a moment; what is loaded stays
                continue


def _score(method: Method, logits: Tensor) -> float:
    """What the adapter's threshold is compared with, of calibrated logits [C]."""
    return float(rejection_score(method, logits[None], method.pick_mode(None)))
