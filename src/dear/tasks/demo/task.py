"""What the package does, on drawn images or on a user's photos: `dear demo`."""

from __future__ import annotations

from pathlib import Path

from dear.clip.model import Clip
from dear.errors import UsageError
from dear.tasks.demo.drawn import drawn_demo
from dear.tasks.demo.facts import DemoFacts
from dear.tasks.demo.parts import PrintLine
from dear.tasks.demo.photos import PhotoDemo, photo_demo
from dear.utils.files import PathLike

#: what a demo writes into its folder, besides folders `run-NAME`
WRITTEN = {"index.html", "results.json", "roles.json", "audit.html", "why.html", "report.html", "heads.html"}


def demo(
    out: PathLike = "demo",
    *,
    data: PathLike | None = None,
    backbone: PathLike | Clip | None = None,
    quick: bool = False,
    data_root: PathLike | None = None,
    device: str = "auto",
    progress: PrintLine = print,
) -> DemoFacts | PhotoDemo:
    """Run the demo; `out` then has run folders, pages, `results.json` and `index.html`.

    A second demo in the same folder uses the runs of the first.

    Args:
        out: folder for everything, new or of an earlier demo.
        data: labeled photos, what `open_data` takes; None: drawn images and the embedded backbone.
        backbone: what `load` takes, or a loaded backbone; with `data` only.
        quick: one task, fewer images and epochs; without `data` only.
        data_root: folder of the benchmarks, for the name of one.
        device: "auto", "cpu", "cuda", …; for photos only.
        progress: called with lines for the reader.

    Raises:
        UsageError: `backbone` without `data`, or the reverse; `out` holds other files.
        DataError: no photos are held out for testing.
    """
    _check_folder(Path(out))
    if data is None:
        if backbone is not None:
            raise UsageError("backbone needs data, your own photos")
        return drawn_demo(out, quick, progress)
    if backbone is None:
        raise UsageError("data needs backbone, the model to adapt")
    if quick:
        raise UsageError("quick is for drawn images; leave it out with data")
    return photo_demo(out, data, backbone, root=data_root, device=device, progress=progress)


def _check_folder(out: Path) -> None:
    """Refuse a folder with files that no demo wrote: its pages could replace some of them."""
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if not name.startswith((".", "run-")) and name not in WRITTEN]
    if foreign:
        raise UsageError(f"{out}: holds other files ({foreign[0]}); name another folder")
