"""What the studio works on: a backbone, its role map, an adapted model, and images to look at."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data import halves, open_data
from dear.data.images import ImageSet
from dear.errors import DataError, DearError, UsageError
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.report.page import Thumbnail, render, thumbnail
from dear.runs.images import run_images
from dear.runs.model import Model, Run
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    from PIL import Image

EXAMPLE = "world:emblems"  #: what the example model learns when no run is given
EXAMPLES = ("world:emblems", "world:vehicles", "world:fauna", "world:textures", "world:scenes")
_EACH = 60  # images of every example task of the studio
MOST_MODELS = 20  #: models kept for comparison


class Stopped(Exception):  # noqa: N818 (nothing went wrong: the person pressed Stop)
    """The work was stopped; a progress callback of the studio raises it."""


@dataclass
class StudioState:
    """Everything the tabs share. One person works at it; a lock keeps two tabs from training at once."""

    clip: Clip  #: the frozen backbone
    roles: RoleMap | None  #: its role map; None until it is found
    images: ImageSet  #: images to look at: the run's own, or examples of the attribute world
    folder: Path  #: private folder for runs and uploads
    model: Model | None = None  #: the adapted model; None until one is trained or loaded
    source: str = ""  #: where the model came from, in words
    local: bool = True  #: the page is served to this computer only, so it may name folders of this computer
    example: bool = False  #: the model is the example that `find_model` trains
    version: int = 0  #: how many models were taken since the start; pages refresh when it rises
    models: dict[str, Model] = field(default_factory=dict)  #: models that can be compared, by name
    service: str | None = None  #: address of an adapter of a running service that is asked, too; None: none
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names to start with: the model's, or all of the example task, of which it learns half."""
        if self.model is not None and not self.example:
            return self.model.classes
        return open_data(EXAMPLE, "test").classes

    @property
    def template(self) -> str:
        """The prompt to start with."""
        return self.model.template if self.model is not None else open_data(EXAMPLE, "test").template

    def find_roles(self, progress: Progress | None = None) -> RoleMap:
        """The role map: the model's, the backbone's own, or one discovered on the studio's images."""
        with self.lock:
            if self.roles is None:
                from dear.heads.discover import discover_roles

                self.roles = discover_roles(self.clip, self.images, concepts="tags", progress=progress)
            return self.roles

    def find_model(self, progress: Progress | None = None) -> Model:
        """The adapted model; without a run a small one is trained on example images, in seconds."""
        with self.lock:
            if self.model is None:
                from dear.tasks.adapt import adapt

                roles = self.find_roles(progress)
                train = open_data(EXAMPLE, "train")
                base = train.select_classes(halves(train.classes)[0])
                report = progress or silent
                done = adapt(
                    base,
                    backbone=self.clip,
                    roles=roles,
                    shots=16,
                    calibrate=False,  # an example should be there at once
                    progress=lambda stage, done, total: report("training an example model", done, total),
                )
                self.model, self.example = done, True
                self.source = f"an example trained just now on {len(base.classes)} classes of {EXAMPLE}"
                self.models["the example model"] = done
            assert self.model is not None
            return self.model

    def use(self, run: Run, source: str, images: ImageSet | None = None) -> None:
        """Take another adapted model, its backbone and, where given, images that fit it."""
        model = Model.of(run)
        with self.lock:
            moved = model.clip is not self.clip
            self.model, self.source, self.example, self.clip = model, source, False, model.clip
            roles = model.method.roles
            if roles is not None or moved:
                self.roles = roles if roles is not None else known_roles(model.clip)
            if images is not None and len(images):
                self.images = images
            self.version += 1
            self.models[f"{len(self.models) + 1}. {source}"] = model
            while len(self.models) > MOST_MODELS:
                del self.models[next(iter(self.models))]


def name_of(images: ImageSet, index: int) -> str:
    """What to call an image: its file, or its class where it lies in no file."""
    key = images.key(index)
    if not Path(key).suffix and len(images.classes) > 1:
        return images.classes[int(images.labels[index])]
    return Path(key).name


def check_folder(state: StudioState, name: str) -> Path:
    """A folder of this computer that the page's visitor may name."""
    if not state.local:
        raise UsageError(
            "this studio is open to other computers, so folders of this one cannot be named here"
        )
    path = Path(name).expanduser()
    if not path.is_dir():
        raise DataError(f"{name}: is not a folder on this computer")
    return path


def gallery_html(title: str, images: Sequence[tuple[Image.Image, str]], what: str = "") -> str:
    """Images with their names as the shared gallery component; `what` begins their alternative texts."""
    shown = [Thumbnail(thumbnail(image, 160), what + name, (("soft", name),)) for image, name in images]
    return render("studio/gallery.html", title=title, images=shown)


def open_state(
    folder: Path,
    run: str | None = None,
    backbone: str | None = None,
    data: str | None = None,
    device: str = "cpu",
    local: bool = True,
) -> StudioState:
    """The state at the start: a run folder, a backbone, or the embedded backbone and its examples."""
    if run is None:
        clip = load(backbone or "mini", device=device)
        images = open_data(data, "all") if data else examples()
        return StudioState(clip, known_roles(clip), images, folder, local=local)
    model = Model.load(run, backbone, device)
    images = open_data(data, "all") if data else _own_images(run)
    roles = known_roles(model.clip) if model.method.roles is None else model.method.roles
    source = f"the run in {run}"
    return StudioState(
        model.clip, roles, images, folder, model, source, local, models={f"1. {source}": model}
    )


def examples(each: int = _EACH) -> ImageSet:
    """Images of several tasks of the attribute world as one set."""
    from dear.data.images import ListedImages

    drawn = [
        (task.image(index), task.classes[int(task.labels[index])])
        for task in (open_data(name, "test") for name in EXAMPLES)
        for index in range(0, len(task), max(1, len(task) // each))
    ]
    items, names = zip(*drawn, strict=True)
    classes = tuple(dict.fromkeys(names))
    labels = torch.tensor([classes.index(name) for name in names])
    return ListedImages(items, labels, classes, name="examples of the attribute world")


def _own_images(run: str) -> ImageSet:
    """The test images a run was made for, where it says so and they are still there; else examples."""
    try:
        return run_images(run)
    except DearError:
        return examples()
