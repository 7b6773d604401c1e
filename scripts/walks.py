"""Measures which files of the package run on the way through three pieces of work, for docs/architecture.md.

    python scripts/walks.py            print the walks
    python scripts/walks.py --write    write them into docs/architecture.md
    python scripts/walks.py --check    fail where a walk is longer than its goal

A file counts when one of its functions is called; what runs while modules are imported does not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dear
from dear import world
from dear.bench import engines
from dear.cli import main as command
from dear.train.loop import Loop

SOURCE = Path(dear.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
GOALS = {"predict": 20, "training step": 12, "bench cell": 25}


@contextlib.contextmanager
def walked(files: list[str]) -> Iterator[None]:
    """Collect, in order, the files whose functions are called inside."""
    seen: dict[CodeType, None] = {}
    importing = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal importing
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            importing += 1 if event == "call" else -1
        elif event == "call" and not importing:
            seen.setdefault(frame.f_code)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for code in seen:
        path = Path(code.co_filename)
        if path.is_relative_to(SOURCE):
            name = path.relative_to(SOURCE).as_posix()
            if name not in files:
                files.append(name)


def run_command(*words: str) -> None:
    """Run `dear` as from a terminal, quietly."""
    before = sys.argv
    sys.argv = ["dear", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                command()
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"dear {' '.join(words)}: {said.getvalue()}") from None
    finally:
        sys.argv = before


def photos(folder: Path) -> Path:
    """A folder of class folders: four classes of the attribute world, eight images each."""
    images = world.task("vehicles", "train")
    for label, name in enumerate(images.classes[:4]):
        (folder / name).mkdir(parents=True)
        for index in (images.labels == label).nonzero().flatten().tolist()[:8]:
            images.image(index).save(folder / name / f"{index}.png")
    return folder


def second_call(owner: Any, name: str, files: list[str], number: int = 2) -> Callable[[], None]:
    """Walk one call of a function, others around it left alone; returns what puts the function back."""
    plain, calls = getattr(owner, name), 0

    def once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        with walked(files) if calls == number else contextlib.nullcontext():
            return plain(*arguments, **options)

    setattr(owner, name, once)
    return lambda: setattr(owner, name, plain)


def measure(folder: Path) -> dict[str, list[str]]:
    """The files of each walk, in the order in which they are first met."""
    walks: dict[str, list[str]] = {name: [] for name in GOALS}
    os.environ["DEAR_CACHE"] = str(folder / "cache")  # nothing is known of the images beforehand
    data, run = photos(folder / "photos"), folder / "run"
    back = second_call(Loop, "_one", walks["training step"])
    run_command("adapt", "--data", str(data), "--out", str(run), "--epochs", "1", "--shots", "3")
    back()
    back = second_call(engines, "attempt", walks["bench cell"], number=1)
    run_command(
        *("bench", "base-to-novel", "--methods", "dear", "--datasets", str(data), "--seeds", "1"),
        *("--shots", "2", "--recipe", "epochs=1", "--out", str(folder / "grid")),
    )
    back()
    image = next(data.rglob("*.png"))
    with walked(walks["predict"]):
        run_command("predict", str(run), str(image))
    walks["predict"].remove("cli/__init__.py")
    walks["predict"].insert(0, "cli/__init__.py")
    return walks


def written(walks: dict[str, list[str]]) -> str:
    """The walks as Markdown."""
    titles = {
        "predict": "`dear predict run photo.jpg`, from the command line to the answer",
        "training step": "one training step of DeAR on a CPU",
        "bench cell": "one cell of `dear bench base-to-novel`, from the engine to its result",
    }
    lines = []
    for name, files in walks.items():
        lines += [f"- **{titles[name]}**: {len(files)} files (goal: {GOALS[name]}).", ""]
        lines += ["  " + ", ".join(f"`{file}`" for file in files), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the walks into docs/architecture.md")
    parser.add_argument("--check", action="store_true", help="fail where a walk is longer than its goal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walks = measure(Path(folder))
    text = written(walks)
    print(text)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        start, end = "<!-- walks -->\n", "<!-- end of walks -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        PAGE.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")
    long = [name for name, files in walks.items() if len(files) > GOALS[name]]
    if options.check and long:
        sys.exit(f"longer than its goal: {', '.join(long)}")


if __name__ == "__main__":
    main()
