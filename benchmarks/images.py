"""From image files to pixels, features, and answers, each compared with what the field uses, in one run.

    OMP_NUM_THREADS=1 python benchmarks/images.py pixels --csv benchmarks/results/images.csv
    python benchmarks/images.py predict start cpu --csv benchmarks/results/images.csv
    python benchmarks/images.py gpu --device cuda --seconds 40 --csv benchmarks/results/images.csv
    python benchmarks/images.py feed --device cuda --images 512 --csv benchmarks/results/feed.csv

- `pixels`: 512 x 512 JPEG files to normalized pixels: ours, and Pillow with bicubic resizing; in threads.
- `predict`: zero-shot answers of a folder with a model of `--shape`: ours, and transformers' image processor
  and CLIPModel behind a DataLoader with `--workers` processes.
- `gpu`: what a GPU waits for, within `--seconds`: `dear embed` of a folder compared with its engine alone
  (pixels on the device) and the same DataLoader; the first epoch of `dear adapt` compared with a DataLoader
  with 8 processes;
  views of files by the GPU's decoder, by the CPU and by torchvision. Rows are written as they come; a stage
  that fails or takes too long is named and left out.
- `feed`: JPEG files to training views on the device, in each of three epochs. Ours decodes each image once,
  keeps its bytes on the device, and crops, resizes, flips, and normalizes there; a DataLoader does all of it
  with Pillow in worker processes, in every epoch. Both return views of the same distribution.
- `precision`: for how many images of `--data` answers in bfloat16 are those in float32.
- `start`: a whole process: `dear --help` and `dear predict` of one image; `--base` names another source tree.
- `cpu`: the image tower on this CPU compared with transformers and onnxruntime, float32 and bfloat16.
- `batches`: the image tower with batches of 1 to 64 images.

Ways take turns and medians are compared, so that whatever else the machine does falls on all; `--cpu-time`
counts processor time instead, which a busy machine leaves alone. What counts is the ratio.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure.clock import medians, wait
from measure.images import feed_rates
from PIL import Image
from torch import Tensor
from torch.utils.benchmark import timer

import dear
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.data.batches import images_at_once, over_batches, pixels_for
from dear.data.images import ListedImages
from dear.images.views import normalize, read_views, resize_crop
from dear.methods import build_method
from dear.runs.model import Model
from dear.tasks.embed.shards import ShardJob, run_shards
from dear.tasks.embed.sources import open_source
from dear.tasks.embed.task import embedder
from dear.tasks.speed import add_rows, machine, photo_folder

CLASSES = [f"class number {number}" for number in range(37)]
Row = dict[str, Any]


# --- models of one shape, with the same random weights ---------------------------------------------------


def transformers_model(shape: str, folder: Path | None = None) -> Any:
    """A transformers CLIP with random weights, left in a folder if one is named: `dear.load` finds it."""
    from transformers import CLIPConfig, CLIPModel

    if shape == "small":
        vision = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
        vision |= {"num_hidden_layers": 12, "image_size": 112, "patch_size": 14}
        text = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
        width = 256
    else:
        config = dear.ClipConfig.named(shape)
        vision, text, width = _sizes(config.vision), _sizes(config.text), config.embed_dim
        vision |= {"image_size": config.vision.image_size, "patch_size": config.vision.patch_size}
    torch.manual_seed(0)
    made = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=width)).eval()
    if folder is not None:
        made.save_pretrained(folder)
    return made


def _sizes(tower: Any) -> dict[str, int]:
    return {
        "hidden_size": tower.width,
        "intermediate_size": tower.mlp,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
    }


class TransformersFolder(torch.utils.data.Dataset[Tensor]):
    """What CLIPProcessor makes of each file."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        from transformers import CLIPImageProcessor

        self.paths = paths
        self.processor = CLIPImageProcessor(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            pixels: Tensor = self.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return pixels


def features_of(model: Any, pixels: Tensor) -> Tensor:
    """Image features of a transformers model, whatever its version returns."""
    output = model.get_image_features(pixel_values=pixels)
    return output if isinstance(output, Tensor) else output.pooler_output


def loader_of(
    paths: Sequence[Path], size: int, batch: int, workers: int, device: torch.device, persistent: bool = False
) -> Any:
    return torch.utils.data.DataLoader(
        TransformersFolder(paths, size),
        batch_size=batch,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=persistent,
    )


@contextmanager
def photos(count: int, size: tuple[int, int] = (500, 375), distinct: int = 400) -> Iterator[list[Path]]:
    """Paths of `count` JPEG files, of which `distinct` differ."""
    with photo_folder(min(count, distinct), size) as folder:
        made = sorted(folder.rglob("*.jpg"))
        for number in range(len(made), count):
            shutil.copy(made[number % len(made)], folder / "class 0" / f"copy {number}.jpg")
        yield sorted(folder.rglob("*.jpg"))[:count]


# --- parts -------------------------------------------------------------------------------------------------


def by_pillow(content: bytes, size: int, mean: Tensor, std: Tensor) -> Tensor:
    """Decode, resize the short side bicubic, crop the center, normalize."""
    with Image.open(io.BytesIO(content)) as opened:
        image = opened.convert("RGB")
    short = min(image.size)
    image = image.resize(
        (size * image.width // short, size * image.height // short), Image.Resampling.BICUBIC
    )
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + size, top + size))))
    return (pixels.permute(2, 0, 1).float() / 255 - mean) / std


def pixels(options: argparse.Namespace) -> list[Row]:
    """Files to normalized pixels of 224 x 224."""
    config, rows = dear.ClipConfig.named("ViT-B-16"), []
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.mean, config.std))
    with photos(64, (512, 512)) as paths:
        contents = [path.read_bytes() for path in paths]
        ways: dict[str, Callable[[bytes], object]] = {
            "Pillow + bicubic": lambda content: by_pillow(content, 224, mean, std),
            "dear": lambda content: normalize(resize_crop(content, 224), config.mean, config.std),
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        times = medians(
            {name: partial(_all, way, contents) for name, way in ways.items()},
            options.repeats,
            warm_up=1,
            clock=options.clock,
        )
        torch.set_num_threads(threads)
        rows += ratios("pixels, one core", "ms an image", {n: 1e3 * s / len(paths) for n, s in times.items()})
        if not options.cpu_time:
            for count in options.threads:
                with ThreadPoolExecutor(count) as pool:
                    times = medians(
                        {name: partial(_all, way, contents, pool) for name, way in ways.items()},
                        options.repeats,
                        warm_up=1,
                    )
                speeds = {name: len(paths) / seconds for name, seconds in times.items()}
                rows += ratios(f"pixels, {count} threads", "images/s", speeds, rate=True)
    return rows


def _all(
    way: Callable[[bytes], object], contents: Sequence[bytes], pool: ThreadPoolExecutor | None = None
) -> None:
    list(pool.map(way, contents) if pool else map(way, contents))


def on_device(options: argparse.Namespace, paths: Sequence[Path]) -> list[Row]:
    """Files to views on the GPU: read there, by the CPU's cores, and decoded by torchvision where it is."""
    contents = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths]

    def ours(device: torch.device | None) -> None:
        read_views(paths, 224, device).to(options.device)
        wait(options.device)

    ways = {"dear, CPU": partial(ours, None), "dear": partial(ours, options.device)}
    with suppress(ImportError):
        from torchvision.io import ImageReadMode, decode_jpeg

        def torchvision() -> None:
            output = torch.stack(decode_jpeg(contents, ImageReadMode.RGB, device=options.device)).float()
            small = torch.nn.functional.interpolate(output, (224, 224), mode="bicubic", antialias=True)
            small.round_().clamp_(0, 255)
            wait(options.device)

        ways["torchvision, content in memory"] = torchvision
    times = medians(ways, options.repeats, warm_up=1)
    speeds = {name: len(paths) / seconds for name, seconds in times.items()}
    return ratios("views on the GPU", "images/s", speeds, rate=True)


def predict(options: argparse.Namespace) -> list[Row]:
    """Answers of a folder, from files to names."""
    with tempfile.TemporaryDirectory() as folder, photos(options.images) as paths:
        reference = transformers_model(options.shape, Path(folder))
        clip = dear.load(folder)
        model = Model(build_method("zeroshot", clip, CLASSES))
        ids = clip.tokenize([f"a photo of a {name}." for name in CLASSES])
        with torch.no_grad():
            output = reference.get_text_features(input_ids=ids)
            text = torch.nn.functional.normalize(
                output if isinstance(output, Tensor) else output.pooler_output
            )
        answers: dict[str, list[str]] = {}

        def ours() -> None:
            (logits,) = model.logits(list(map(str, paths)), cached=False).values()  # most photos are links
            answers["dear"] = [CLASSES[best] for best in logits.argmax(-1).tolist()]

        @torch.no_grad()
        def by_transformers() -> None:
            size, names = clip.config.vision.image_size, []
            for batch in loader_of(paths, size, 16, options.workers, torch.device("cpu")):
                features = torch.nn.functional.normalize(features_of(reference, batch))
                names += [CLASSES[best] for best in (features @ text.T).argmax(-1).tolist()]
            answers["transformers"] = names

        ways = {f"transformers, {options.workers} workers": by_transformers, "dear": ours}
        clock = _all_processors if options.cpu_time else timer
        times = medians(ways, options.repeats, warm_up=0, clock=clock)
        same = np.mean([a == b for a, b in zip(answers["dear"], answers["transformers"], strict=True)])
        print(f"the same answer for {100 * same:.1f}% of {len(paths)} images")
        speeds = {name: len(paths) / seconds for name, seconds in times.items()}
        return ratios(f"predict, {options.shape}", "images/s", speeds, rate=True)


def features(options: argparse.Namespace) -> list[Row]:
    """How far views and features are from Pillow's; files of `--data` or made ones."""
    clip = dear.load(options.backbone or "mini")
    size = clip.config.vision.image_size
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (clip.config.mean, clip.config.std))
    with photos(52, (500, 375)) as made:
        paths = sorted(options.data.rglob("*.jp*g"))[:52] if options.data else made
        contents = [path.read_bytes() for path in paths]
    reference = torch.stack([by_pillow(content, size, mean, std) for content in contents])
    ours = torch.stack(
        [normalize(resize_crop(one, size), clip.config.mean, clip.config.std) for one in contents]
    )
    steps = ((ours - reference) * std * 255).abs().round()
    expected, output = clip.encode_image(reference), clip.encode_image(ours)
    off = (output - expected).norm(dim=1) / expected.norm(dim=1)
    values = {
        "largest of 255": steps.max(), "values off by more than 1": (steps > 1).sum(),
        "features, median": off.median(), "features, largest": off.max(),
    }  # fmt: skip
    return [
        {"work": f"{len(paths)} views compared with Pillow's", "way": name, "value": f"{float(value):.2e}",
         "unit": "", "dear_is_faster": ""}
        for name, value in values.items()
    ]  # fmt: skip


def precision(options: argparse.Namespace) -> list[Row]:
    """For how many images of `--data` zero-shot answers do not depend on precision and library."""
    clip, data = dear.load(options.backbone), dear.open_data(options.data, "all")
    data = data.subset(
        torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: options.images]
    )
    method = build_method("zeroshot", clip, data.classes, template=data.template)

    def logits(precision: str) -> Tensor:
        return next(iter(Model(method, precision=precision).logits(data).values()))

    whole = logits("float32")
    others = {"bfloat16 as float32": logits("bfloat16")}
    rows = []
    for way, output in others.items():
        print(f"{way}: scores are {float((output - whole).abs().max()):.1e} apart at most")
        same = int((whole.argmax(1) == output.argmax(1)).sum())
        rows.append({"work": f"answers for {len(data)} images", "way": way, "value": str(same),
                     "unit": "images", "dear_is_faster": ""})  # fmt: skip
    return rows


def gpu(options: argparse.Namespace) -> Iterator[list[Row]]:
    """What a GPU waits for, with random weights; the model lies on the device before anything is timed."""
    began, device = time.perf_counter(), options.device
    with tempfile.TemporaryDirectory() as folder, photos(options.images, distinct=48) as paths:
        clip = dear.Clip(dear.ClipConfig.named(options.shape)).requires_grad_(False).eval().to(device)
        print(f"{len(paths)} files and the model: {time.perf_counter() - began:.1f} s", flush=True)
        rates: dict[str, float] = {}
        some = paths[: options.few]
        stages: dict[
            str, tuple[float, Callable[[], list[Row]]]
        ] = {  # each with its largest share of the time
            "engine": (0.5, lambda: _engine(clip, rates)),
            "embed": (0.4, lambda: _embed(options, clip, paths, Path(folder), rates)),
            "epoch": (0.2, lambda: _epoch(options, clip, some)),
            "transformers": (0.4, lambda: _by_transformers(options, some, rates)),
            "views": (0.2, lambda: on_device(options, paths[:256])),
        }
        for name, (share, stage) in stages.items():
            since = time.perf_counter()
            try:
                with _deadline(min(share * options.seconds, options.seconds + began - since)):
                    yield stage()
            except Exception as error:
                print(f"{name}: left out ({type(error).__name__}: {error})", flush=True)
            print(f"{name}: {time.perf_counter() - since:.1f} s", flush=True)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{seconds:.0f} s were left for it")

    if seconds < 1:
        late()
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _engine(clip: Clip, rates: dict[str, float]) -> list[Row]:
    """The image tower alone on pixels that lie on the device."""
    plain, count = (
        clip.cast(matrix_dtype("auto", clip.device)),
        256 if clip.device.type == "cuda" else 8,
    )
    size = clip.config.vision.image_size
    raw = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, device=clip.device)

    @torch.no_grad()
    def engine() -> None:
        for _ in range(8):
            plain.encode_image(normalize(raw, clip.config.mean, clip.config.std))
        wait(clip.device)

    rates["engine alone"] = 8 * count / medians({"engine": engine}, 3, warm_up=1)["engine"]
    return []


def _embed(
    options: argparse.Namespace, clip: Clip, paths: Sequence[Path], folder: Path, rates: dict[str, float]
) -> list[Row]:
    """All of `dear embed` but loading the model: from a folder to Parquet, where pyarrow is installed."""
    compute, turns = embedder(clip), iter(range(100))
    tower, parquet = clip.cast(matrix_dtype("auto", clip.device)), find_spec("pyarrow") is not None

    def run(where: Path) -> None:
        source = open_source(where)
        if parquet:
            job = ShardJob(source, folder / f"out {next(turns)}", {"what": "features"})
            run_shards(job, lambda: compute, device=clip.device)
        else:
            images = source.images
            over_batches(images, lambda *some: tower.encode_image(pixels_for(tower, *some)).cpu(), clip)

    run(paths[-1].parent)  # libraries are loaded, kernels compiled
    times = medians({"dear": partial(run, paths[0].parent.parent)}, options.repeats, warm_up=0)["dear"]
    rates["dear"] = len(paths) / times
    what = "embed" if parquet else "embed without Parquet"
    return ratios(f"{what}, {options.shape}", "images/s", rates, rate=True)


def _by_transformers(
    options: argparse.Namespace, paths: Sequence[Path], rates: dict[str, float]
) -> list[Row]:
    """A transformers model behind a DataLoader whose processes are warm: a second time over some files."""
    device = options.device
    model = transformers_model(options.shape).to(device, matrix_dtype("auto", device))
    size = model.config.vision_config.image_size
    loader = loader_of(paths, size, 64, options.workers, device, persistent=True)

    @torch.no_grad()
    def once() -> None:
        for batch in loader:
            features_of(model, batch.to(device, model.dtype, non_blocking=True)).float().cpu()

    seconds = medians({"transformers": once}, 1, warm_up=1)["transformers"]
    speeds = {
        f"transformers, {options.workers} workers": len(paths) / seconds,
        "dear": rates.get("dear", math.nan),
    }
    return ratios(f"embed, {options.shape}", "images/s", speeds, rate=True)[:1]


def feed(options: argparse.Namespace) -> list[Row]:
    """Files to training views on the device, epoch by epoch."""
    clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to(options.device)
    with photos(options.images) as paths:
        labels = torch.arange(len(paths)) % 4
        data = ListedImages(tuple(paths), labels, tuple("abcd"))
        epochs = feed_rates(data, clip, batch=16, epochs=3, workers=(options.workers,))
    rows: list[Row] = []
    for epoch in (1, 2, 3):
        rates = {row["way"]: row["images_per_s"] for row in epochs if row["epoch"] == epoch}
        rows += ratios(f"feed, epoch {epoch}", "images/s", rates, rate=True)
    return rows


def _epoch(options: argparse.Namespace, clip: Clip, paths: Sequence[Path]) -> list[Row]:
    """The first epoch of a training: every file is decoded, views are cropped."""
    data = ListedImages(tuple(paths), torch.arange(len(paths)) % 4, tuple("abcd"))
    workers = 8 if options.device.type == "cuda" else options.workers
    output = feed_rates(data, clip, epochs=1, workers=(workers,))
    speeds = {row["way"]: row["images_per_s"] for row in output}
    return ratios("first epoch", "images/s", dict(reversed(speeds.items())), rate=True)


def start(options: argparse.Namespace) -> list[Row]:
    """Processes from nothing to their answer, with compiled bytecode as after an installation."""
    trees = {"dear": Path(dear.__file__).parents[1]}
    if options.base:
        trees = {f"dear at {options.base.name}": options.base / "src", **trees}
    rows = []
    with tempfile.TemporaryDirectory() as name, photos(12) as paths:
        folder = Path(name)
        transformers_model("small", folder / "clip")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "DEAR_CACHE": str(folder / "cache")}

        def ran(tree: Path, *words: str) -> None:
            program = ["-c", "from dear.cli import main; main()", *words] if words else ["-c", "import torch"]
            subprocess.run(
                [sys.executable, *program],
                env=environment | {"PYTHONPATH": str(tree)},
                check=True,
                capture_output=True,
            )

        for way, tree in trees.items():
            run = str(folder / f"run of {way}")
            learn = (
                "adapt",
                "-d",
                str(paths[0].parent.parent),
                "-o",
                run,
                "-m",
                "linear-probe",
                "--epochs",
                "1",
            )
            ran(tree, *learn, "--backbone", str(folder / "clip"))
        clock = _children if options.cpu_time else timer
        works = {way: partial(ran, tree, "--help") for way, tree in trees.items()}
        rows += ratios("start, dear --help", "s", medians(works, options.repeats, 1, clock))
        works = {
            way: partial(ran, tree, "predict", str(folder / f"run of {way}"), str(paths[0]))
            for way, tree in trees.items()
        }
        works = {"import torch alone": partial(ran, trees["dear"]), **works}
        rows += ratios("start, dear predict of one image", "s", medians(works, options.repeats, 1, clock))
    return rows


def _all_processors() -> float:
    """Processor seconds of this process and of those that it started and that have ended."""
    return time.process_time() + _children()


def _children() -> float:
    """Processor seconds of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu(options: argparse.Namespace) -> list[Row]:
    """The image tower alone, batches of 1 and 16."""
    rows = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            reference = transformers_model(shape, Path(folder))
            clip = dear.load(folder)
            half, compiled = clip.cast(torch.bfloat16), _onnx(clip, folder)
            small = None if compiled is None else _onnx(clip, folder, int8=True)
            size = clip.config.vision.image_size
            for batch in (1, 16):
                inputs = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
                ways: dict[str, Callable[[], Any]] = {
                    "transformers": partial(features_of, reference, inputs),
                    "dear": partial(clip.encode_image, inputs),
                    "dear, bfloat16": partial(half.encode_image, inputs),
                }
                if compiled is not None:
                    ways["onnxruntime"] = partial(compiled, inputs)
                if small is not None:
                    ways["onnxruntime, int8"] = partial(small, inputs)
                with torch.no_grad():
                    times = medians(ways, options.repeats, warm_up=1, clock=options.clock)
                    expected = clip.encode_image(inputs)
                    for name, way in ways.items():
                        off = (torch.as_tensor(way()).float() - expected).norm() / expected.norm()
                        print(f"{shape}, batch {batch}, {name}: {float(off):.1e} from dear in float32")
                ms = {name: 1e3 * seconds for name, seconds in times.items()}
                rows += ratios(f"image tower, {shape}, batch {batch}", "ms", ms)
    return rows


def batches(options: argparse.Namespace) -> list[Row]:
    """The image tower, images one by one to 64 at once."""
    with tempfile.TemporaryDirectory() as folder:
        transformers_model(options.shape, Path(folder))
        clip = dear.load(folder)
    size = clip.config.vision.image_size
    inputs = {batch: torch.randn(batch, 3, size, size) for batch in (1, 4, 8, 16, 32, 64)}
    ways = {str(batch): partial(clip.encode_image, pixels) for batch, pixels in inputs.items()}
    times = medians(ways, options.repeats, warm_up=1, clock=options.clock)
    ms = {f"batch {name}": 1e3 * seconds / int(name) for name, seconds in times.items()}
    at_once = images_at_once(clip)
    work = f"image tower, {options.shape}, in batches"
    return ratios(f"{work}; {at_once} at once is taken", "ms an image", ms, anchor="batch 32")


def _onnx(clip: Clip, folder: str, int8: bool = False) -> Callable[[Tensor], Any] | None:
    """The image tower in onnxruntime; `int8`: with the matrices of the file before in 8 bits."""
    try:
        import onnxruntime
    except ImportError:
        return None
    from dear.export.graph import traceable_clip

    path = str(Path(folder) / "tower.onnx")
    size = clip.config.vision.image_size
    if int8:
        from onnxruntime.quantization import quantize_dynamic

        inputs, path = path, str(Path(folder) / "int8.onnx")
        quantize_dynamic(inputs, path)
    else:
        torch.onnx.export(
            traceable_clip(clip).visual,
            (torch.zeros(2, 3, size, size),),
            path,
            input_names=["pixels"],
            dynamic_shapes={"pixels": {0: "batch"}},
            dynamo=True,
            verbose=False,
        )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, {"pixels": inputs.numpy()})[0]


PARTS = {
    "pixels": pixels, "features": features, "precision": precision, "predict": predict, "gpu": gpu,
    "feed": feed, "start": start, "cpu": cpu, "batches": batches,
}  # fmt: skip


def ratios(
    work: str, unit: str, values: dict[str, float], rate: bool = False, anchor: str = "dear"
) -> list[Row]:
    """Rows whose last column says how many times faster ours is than each; the first way is the anchor."""
    ours = values[anchor]
    return [
        {
            "work": work,
            "way": way,
            "value": f"{value:.4g}",
            "unit": unit,
            "dear_is_faster": f"{(ours / value if rate else value / ours):.2f}",
        }
        for way, value in values.items()
    ]


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--images", type=int, default=None, help="default: 1,000 (for gpu 20,000)")
    parser.add_argument("--few", type=int, default=2_000, help="images for slow ways, for gpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="for all of gpu")
    parser.add_argument("--shape", default=None, help="default: small (for gpu ViT-B-16)")
    parser.add_argument("--shapes", nargs="+", default=["small", "ViT-B-16"], help="for cpu")
    parser.add_argument("--workers", type=int, default=None, help="of DataLoaders; default: 2 (GPU: 14)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="for pixels")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder of JPEG files, or data, for features and precision")
    parser.add_argument("--backbone", help="for features and precision")
    parser.add_argument("--base", type=Path, help="another source tree, for start")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, on a machine that does more")
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    whole = "gpu" in options.parts
    options.images = options.images or (20_000 if whole else 1_000)
    options.shape = options.shape or ("ViT-B-16" if whole else "small")
    options.workers = options.workers or (14 if options.device.type == "cuda" else 2)
    options.clock = time.process_time if options.cpu_time else timer
    clock = "processor" if options.cpu_time else "wall"
    for part in options.parts:
        output: Any = PARTS[part](options)
        for rows in [output] if isinstance(output, list) else output:
            for row in rows:
                print(
                    f"{row['work']:40} {row['way']:28} {row['value']:>9} {row['unit']:12} "
                    f"{row['dear_is_faster']}",
                    flush=True,
                )
            if options.csv:
                add_rows(options.csv, [{**machine(options.device), "clock": clock, **row} for row in rows])


if __name__ == "__main__":
    main()
