"""The service without HTTP: store, queue and decoder, from start to stop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import torch
from torch import Tensor

from dear.clip.gpu.recorded import Recorder
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError
from dear.methods.base import Method
from dear.methods.calibration import rejection_score, run_threshold
from dear.serve.batcher import Batcher
from dear.serve.decode import Decoder, Decoding, Upload
from dear.serve.engine import Engine, ImageJob
from dear.serve.errors import Refused
from dear.serve.galleries import Galleries, Match, Search
from dear.serve.guard import LOG
from dear.serve.metrics import Metrics
from dear.serve.settings import ServeSettings
from dear.serve.store import Adapter, AdapterStore

_MOST_KINDS = 6  # of adapters whose batches are recorded at the start


class Service:
    """One backbone, any number of adapters, one queue.

    Args:
        folder: holds a run folder per adapter.
        clip: the backbone on its device.
        settings: limits, batching and how many adapters stay loaded.
        galleries: images to search, by name.
        recorder: of batches that come again; None: one that records on GPUs.
    """

    def __init__(
        self,
        folder: Path,
        clip: Clip,
        settings: ServeSettings | None = None,
        galleries: Mapping[str, ImageSet] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = settings = settings or ServeSettings()
        self.clip = clip
        self.metrics = Metrics()
        self.store = AdapterStore(folder, clip, settings.loaded_adapters, settings.precision)
        self.store.refresh()
        size = clip.config.view
        workers, processes = settings.decoding(clip.device.type)
        how = Decoding(size, settings.limits.pixels, settings.reduced_jpeg)
        self.decoder = Decoder(workers, how, processes)
        engine = Engine(clip, settings.precision, recorder)
        largest, wait = settings.batching(clip.device.type)
        self.recorded = 0  #: recordings made before the first request
        if engine.run.records(clip.device):
            kinds = self.store.one_of_each_kind(_MOST_KINDS)
            self.recorded = engine.prepare([one.method for one in kinds], largest)
        self.batcher: Batcher[ImageJob, Tensor] = Batcher(
            engine.compute,
            largest,
            wait,
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
            found = await self._computed(uploads, lambda pixels: ImageJob(pixels, method))
        if method is None:
            return found, (), [False] * len(found)
        refused = [limit is not None and _score(method, own) < limit.value for own in found]
        return [own.softmax(dim=-1) for own in found], method.classes, refused

    async def matches(
        self, uploads: Sequence[Upload], search: Search, gallery: str, attribute: str | None, top: int
    ) -> list[dict[str, list[Match]]]:
        """For each image: the images of a gallery most like it, by space; None asks for every space.

        Raises:
            Refused: there is no such attribute, an image cannot be read, or the time is up.
        """
        wanted = search.names if attribute is None else (search.space(attribute),)
        with self._in_time():
            queries = await self._computed(uploads, search.job)
            near = await self.galleries.index(gallery, search)
        return [
            {name: self.galleries.best(gallery, near(name, query), top) for name in wanted}
            for query in queries
        ]

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        seconds = self.settings.limits.seconds
        try:
            with anyio.fail_after(seconds):
                yield
        except TimeoutError:
            raise Refused(503, f"no answer within {seconds:g} seconds; try again", retry_after=1) from None

    async def _computed(self, uploads: Sequence[Upload], job: Callable[[Tensor], ImageJob]) -> list[Tensor]:
        pixels = await self.decoder.decode(uploads)
        futures = self.batcher.submit([job(one) for one in pixels])
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
            before = self.store.problems()
            try:
                self.store.refresh()
            except OSError:  # the folder is away for a moment; what is loaded stays
                continue
            for name, reason in self.store.problems().items():
                if before.get(name) != reason:
                    LOG.warning(json.dumps({"adapter": name, "not served": reason}))


def _score(method: Method, logits: Tensor) -> float:
    """What the adapter's threshold is compared with, of calibrated logits [C]."""
    return float(rejection_score(method, logits[None], method.pick_mode(None)))
