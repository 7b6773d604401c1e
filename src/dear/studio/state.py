"""What the studio works on: a backbone, its role map, a model, and images."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data import open_data
from dear.data.images import ImageSet
from dear.errors import DataError, DearError, UsageError
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.methods.zeroshot import ZeroShot
from dear.report.page import Thumbnail, render, thumbnail
from dear.runs.images import run_images
from dear.runs.model import Model, Run
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from PIL import Image

EXAMPLES = ("world:emblems", "world:vehicles", "world:fauna", "world:textures", "world:scenes")
_EACH = 60  # images of every example task
MOST_MODELS = 20  #: models kept for comparison


class Stopped(Exception):  # noqa: N818 (nothing went wrong: the person pressed Stop)
    """The work was stopped; a progress callback of the studio raises it."""


@dataclass
class StudioState:
    """Everything that the tabs share."""

    clip: Clip  #: the frozen backbone
    roles: RoleMap | None  #: its role map; None until the Heads tab discovers one
    images: ImageSet  #: images of the studio: the user's, those of the run, or examples
    folder: Path  #: private folder for runs and uploads
    model: Model  #: answers images: a run, or the frozen backbone until one is trained
    source: str = ""  #: origin of the model, in words; "" for the frozen backbone
    local: bool = True  #: only this computer can open the page, so it may name local folders
    data: str = ""  #: the dataset to train on, as `open_data` takes it; "" where none is named
    version: int = 0  #: number of models that replaced the first one; pages refresh when it rises
    models: dict[str, Model] = field(default_factory=dict)  #: models that can be compared, by name
    lock: threading.RLock = field(default_factory=threading.RLock)  #: while model or training change
    roles_lock: threading.RLock = field(default_factory=threading.RLock)  #: while roles are discovered
    servers: ExitStack = field(default_factory=ExitStack)  #: labeling pages, which end with the studio

    @property
    def trained(self) -> bool:
        """Whether the model was trained."""
        return not isinstance(self.model.method, ZeroShot)

    def find_roles(self, progress: Progress | None = None) -> RoleMap:
        """The role map: of the model, of the backbone, or discovered on the studio's images.

        A discovery takes a minute; it blocks neither answers nor training.
        """
        with self.roles_lock:
            if self.roles is not None:
                return self.roles
            from dear.heads.discover import discover_roles

            clip = self.clip
            roles = discover_roles(clip, self.images, concepts="tags", progress=progress)
            if self.clip is clip:  # not where a training brought another backbone meanwhile
                self.roles = roles
            return roles

    def use(self, run: Run, source: str, images: ImageSet | None = None) -> None:
        """Replace the model, its backbone, and optionally the images."""
        model = Model.of(run)
        with self.lock:
            moved = model.clip is not self.clip
            self.model, self.source, self.clip = model, source, model.clip
            roles = model.method.roles
            if roles is not None or moved:
                self.roles = roles if roles is not None else known_roles(model.clip)
            if images is not None and len(images):
                self.images = images
            self.version += 1
            self.models[f"{self.version}. {source}"] = model
            while len(self.models) > MOST_MODELS:
                del self.models[next(iter(self.models))]


def name_of(images: ImageSet, index: int) -> str:
    """The name of an image: its file, or its class where it is no file."""
    key = images.key(index)
    if not Path(key).suffix and len(images.classes) > 1:
        return images.classes[int(images.labels[index])]
    return Path(key).name


def check_folder(state: StudioState, name: str) -> Path:
    """A folder of this computer that a visitor may name."""
    if not state.local:
        raise UsageError(f"{name}: folders can be named only in a studio that is not open to other computers")
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
    """The state at the start: a run, or the frozen backbone on the classes of the data or of examples."""
    if run is None:
        clip = load(backbone or "mini", device=device)
        images = open_data(data, "all") if data else examples()
        model = Model(ZeroShot(clip, images.classes, template=images.template))
        return StudioState(clip, known_roles(clip), images, folder, model, local=local, data=data or "")
    model = Model.load(run, backbone, device)
    images = open_data(data, "all") if data else _images_of(run)
    roles = known_roles(model.clip) if model.method.roles is None else model.method.roles
    source = f"Run “{Path(run).name}”"
    trained_on = "" if model.spec is None else str(model.spec.data or "")
    state = StudioState(model.clip, roles, images, folder, model, source, local, data or trained_on)
    state.models[source] = model
    return state


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


def _images_of(run: str) -> ImageSet:
    """The test images of a run's dataset, where they are still available; else examples."""
    try:
        return run_images(run)
    except DearError:
        return examples()
