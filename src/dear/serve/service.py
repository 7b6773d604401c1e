"""The service without HTTP: store, queue, reader and decoder, from start to stop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dear.clip.gpu import Recorder
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError, InputError
from dear.runs.answer import Answer
from dear.runs.ranking import Ranking
from dear.serve.archive import install_run, recover
from dear.serve.batcher import TEXT_COST, Batcher
from dear.serve.class_lists import ClassLists
from dear.serve.decoding import Decoder, Decoding
from dear.serve.engine import Answerer, Engine, ImageJob, role_bars
from dear.serve.errors import Refused
from dear.serve.galleries import Galleries, Match, Search
from dear.serve.keys import MANAGEMENT, Keys
from dear.serve.metrics import Metrics
from dear.serve.middleware import LOG
from dear.serve.requests import RequestReader
from dear.serve.settings import ServeSettings
from dear.serve.store import Adapter, AdapterStore, Card
from dear.serve.traffic import Traffic
from dear.utils.memory import trim_memory

_MOST_KINDS = 6  # of adapters whose batches are recorded at the start
_EXPLAINING = 3  # images that one explained image costs as much as
_EXPLAINED_AT_ONCE = 4  # images, between two batches
_TEXTS_AT_ONCE = 16  # of an embedding request that are encoded between two batches

Image = Tensor | Refused  #: decoded, uint8 [3, S, S], or why it was not


class Service:
    """One backbone, any number of adapters (a run folder each in `folder`), one queue.

    Without `keys` everybody has access. `recorder` records repeated batches on a GPU; None: a new one.
    """

    def __init__(
        self,
        folder: Path,
        clip: Clip,
        settings: ServeSettings | None = None,
        galleries: Mapping[str, ImageSet] | None = None,
        recorder: Recorder | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.settings = settings = settings or ServeSettings()
        limits, device = settings.limits, clip.device.type
        self.clip = clip
        path = Path(clip.name)
        self.backbone = path.name if path.is_absolute() or path.exists() else clip.name  #: for clients
        self.keys = keys or Keys()
        self.metrics = Metrics()
        self.traffic = Traffic(limits)
        self.store = AdapterStore(folder, clip, settings.loaded_adapters, settings.precision)
        recover(folder)
        self.store.refresh()
        size = clip.config.view
        decoding = Decoding(size, limits)
        self.decoder = Decoder(settings.decoding(device), decoding)
        self.reader = RequestReader(decoding)
        engine = Engine(clip, settings.precision, recorder)
        largest, wait = settings.batching(device)
        self.recorded = 0  #: recordings made before the first request
        if engine.run.records(clip.device):
            kinds = self.store.one_of_each_kind(_MOST_KINDS)
            self.recorded = engine.prepare([one.answerer for one in kinds], largest)
        queued = limits.queued_images
        self.batcher: Batcher[ImageJob, Any] = Batcher(
            engine.begin,
            largest,
            wait,
            queued,
            max(limits.images, queued // 2) if self.keys.has_multiple_callers else None,
            self.metrics.observe_batch,
        )
        self.metrics.queued.set_function(lambda: self.batcher.queued)
        self.metrics.adapters.set_function(lambda: len(self.store.cards()))
        self.metrics.loaded.set_function(lambda: self.store.loaded)
        self.galleries = Galleries(galleries or {}, size, self.batcher.compute)
        self._loaders = ThreadPoolExecutor(4, thread_name_prefix="dear-serve-load")
        self._managers = ThreadPoolExecutor(2, thread_name_prefix="dear-serve-manage")
        self.class_lists = ClassLists(self.batcher)
        self._stopping = threading.Event()
        self._memory = ExitStack()
        self._memory.enter_context(trim_memory())
        self._watcher = threading.Thread(target=self._watch, name="dear-serve-watch", daemon=True)
        self._watcher.start()

    def unready_reason(self) -> str | None:
        """Why requests are not answered; None where they are."""
        seconds = self.settings.stall_seconds
        if self._stopping.is_set():
            return "the service is shutting down"
        if self.decoder.starting:
            return "the decoders are starting"
        if self.decoder.is_stalled(seconds):
            return f"no image was decoded for {seconds:g} seconds"
        if self.batcher.is_stalled(seconds):
            return f"no image was answered for {seconds:g} seconds"
        return None

    async def adapter(self, name: str) -> Adapter:
        """An adapter, loaded in the background if need be, with its class texts encoded."""
        adapter = self.store.ready(name)
        if adapter is None:
            loop = asyncio.get_running_loop()
            adapter = await loop.run_in_executor(self._loaders, self.store.get, name)
        if not adapter.prepared:  # for all requests: the cost is not charged to the first caller
            if adapter.preparing is None or adapter.preparing.done():
                adapter.preparing = asyncio.create_task(self.class_lists.prepare(adapter))
            await asyncio.shield(adapter.preparing)
        return adapter

    async def on_classes(
        self, adapter: Adapter, classes: tuple[str, ...] | None, caller: str = ""
    ) -> Answerer:
        """The adapter on other classes, with their texts encoded; None: on the trained ones."""
        if classes is None or classes == adapter.card.classes:
            return adapter.answerer
        return await self.class_lists.get(adapter, classes, caller)

    async def features(self, images: Sequence[Image], caller: str = "") -> list[Tensor | Refused]:
        """Unit features [E] of each image under the frozen backbone, or why there is none."""
        return await self._compute(images, lambda pixels: ImageJob(pixels, None), caller)

    async def answers(
        self,
        images: Sequence[Image],
        adapter: Adapter,
        answerer: Answerer,
        top: int,
        reject: float | None = None,
        certain: float | None = None,
        caller: str = "",
    ) -> list[Answer | Refused]:
        """The answer of an adapter for each image, or why there is none.

        Args:
            images: decoded.
            adapter: that answers.
            answerer: of the adapter, on the classes of the request.
            top: number of classes to list.
            reject: share of images of known classes that may be rejected; None: no image is.
            certain: of an adapter with a tree: the probability that a named node has at least; None: 0.8.
            caller: who sends the request.
        """
        ranking = answerer.rankings.get((top, reject, certain))
        if ranking is None:
            ranking = await self.class_lists.build(_build_ranking, answerer, top, reject, certain)
        answers = await self._compute(images, lambda one: ImageJob(one, answerer, ranking), caller)
        if any(isinstance(one, Answer) and not one.classes for one in answers):
            raise _not_finite(adapter.card.name)
        return answers

    async def role_bars(
        self, images: Sequence[Image], answerer: Answerer, caller: str = ""
    ) -> list[dict[str, Any] | Refused]:
        """The answer for each image and its score as a sum over roles, or why there is none."""
        readable = [one for one in images if not isinstance(one, Refused)]
        bars: list[dict[str, Any]] = []
        for start in range(0, len(readable), _EXPLAINED_AT_ONCE):
            chunk = readable[start : start + _EXPLAINED_AT_ONCE]
            explain = partial(role_bars, answerer.model, chunk)
            bars += await self.batcher.call(explain, caller, _EXPLAINING * len(chunk))
        ordered = iter(bars)
        return [one if isinstance(one, Refused) else next(ordered) for one in images]

    async def matches(
        self,
        images: Sequence[Image],
        search: Search,
        gallery: str,
        attribute: str | None,
        top: int,
        caller: str = "",
    ) -> list[dict[str, list[Match]] | Refused]:
        """The most similar images of a gallery for each image by space; without `attribute` in all spaces."""
        names = search.names if attribute is None else (search.space(attribute),)
        queries = await self._compute(images, search.job, caller)
        similarity = await self.galleries.index(gallery, search, caller)
        return [
            query
            if isinstance(query, Refused)
            else {name: self.galleries.best(gallery, similarity(name, query), top) for name in names}
            for query in queries
        ]

    async def _compute(
        self, images: Sequence[Image], job: Callable[[Tensor], ImageJob], caller: str
    ) -> list[Any]:
        jobs = [job(one) for one in images if not isinstance(one, Refused)]
        computed = iter(await self.batcher.compute(jobs, caller))
        return [one if isinstance(one, Refused) else next(computed) for one in images]

    def check_embedding_model(self, model: str | None, dimensions: int | None) -> None:
        """Refuse a request for embeddings that the backbone cannot answer."""
        if model is not None and model != self.backbone:
            raise Refused(404, f"model must be {self.backbone!r}, got {model[:100]!r}")
        width = self.clip.config.embed_dim
        if dimensions is not None and dimensions != width:
            raise Refused(400, f"dimensions must be {width}, got {dimensions}")

    async def text_features(self, texts: Sequence[str], caller: str = "") -> tuple[Tensor, int]:
        """Unit text features [N, E], and the number of tokens."""
        parts, start = [(torch.empty(0, self.clip.config.embed_dim), 0)], 0
        while start < len(texts):
            chunk = texts[start : start + self.class_lists.pace.pieces(_TEXTS_AT_ONCE)]
            timed = partial(self.class_lists.pace.measure, len(chunk), partial(self._encode_texts, chunk))
            parts.append(await self.batcher.call(timed, caller, TEXT_COST * len(chunk)))
            start += len(chunk)
        return torch.cat([features for features, _ in parts]), sum(tokens for _, tokens in parts)

    @torch.inference_mode()
    def _encode_texts(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        try:
            ids = self.clip.tokenize(texts)
        except InputError as error:
            raise Refused(400, str(error)) from None
        features = torch.nn.functional.normalize(self.clip.encode_text(ids).float(), dim=-1).cpu()
        return features, int(ids.count_nonzero())

    # -- management -------------------------------------------------------------------------------

    async def manage(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a function that may take long in a thread for management."""
        return await asyncio.get_running_loop().run_in_executor(self._managers, function, *values)

    def install(self, content: bytes, name: str) -> Card:
        """Serve the run of an archive under a name after it has answered an image."""
        return install_run(content, name, self.store, self.settings.limits.upload_bytes, self._check_answers)

    def _check_answers(self, adapter: Adapter) -> None:
        side = self.clip.config.vision.image_size
        blank = torch.full((3, side, side), 127, dtype=torch.uint8)
        try:
            trial = asyncio.wait_for(self._trial_logits(adapter, blank), self.settings.limits.seconds)
            if not bool(asyncio.run(trial).isfinite().all()):
                raise _not_finite(adapter.card.name)
        except Exception as error:  # the values of an adapter may fail in any way
            LOG.warning(json.dumps({"upload": adapter.card.name, "failed": repr(error)}))
            raise Refused(400, "the run cannot be served: it does not answer an image") from error

    async def _trial_logits(self, adapter: Adapter, pixels: Tensor) -> Tensor:
        await self.class_lists.prepare(adapter)
        (logits,) = await self.batcher.compute([ImageJob(pixels, adapter.answerer)], MANAGEMENT)
        return cast(Tensor, logits)

    # -- operation --------------------------------------------------------------------------------

    def close(self, seconds: float | None = None) -> None:
        """Answer what is queued, then stop all threads; what takes longer than `drain_seconds` is refused."""
        until = time.monotonic() + (self.settings.drain_seconds if seconds is None else seconds)
        self._stopping.set()
        self.decoder.close()
        self.reader.close()
        self.batcher.close(max(0.1, until - time.monotonic()))
        self.class_lists.close()
        for pool in (self._loaders, self._managers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._watcher.join(1.0)
        self._memory.close()

    def _watch(self) -> None:
        """Follow the runs folder and the key file, whatever happens to them."""
        while not self._stopping.wait(self.settings.poll_seconds):
            try:
                self._refresh()
            except Exception:  # what is loaded stays; the next look may succeed
                LOG.exception(json.dumps({"runs folder": "cannot be read"}))

    def _refresh(self) -> None:
        before = self.store.problems()
        try:
            if self.keys.reload():
                LOG.info(json.dumps({"keys": "read again"}))
        except DearError as error:
            LOG.warning(json.dumps({"keys": "kept as they were", "reason": str(error)}))
        with suppress(OSError):  # the folder is away for a moment; what is loaded stays
            self.store.refresh()
        for name, reason in self.store.problems().items():
            if before.get(name) != reason:
                LOG.warning(json.dumps({"adapter": name, "not served": reason}))


def _build_ranking(answerer: Answerer, *options: Any) -> Ranking:
    try:
        return answerer.ranking(*options)
    except DearError as error:
        raise Refused(400, str(error)) from None


def _not_finite(name: str) -> Refused:
    """The refusal of scores that are not finite: an adapter's values may be finite and too large."""
    return Refused(409, f"adapter {name!r} returns scores that are not finite; train it again")
