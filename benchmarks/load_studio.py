"""Many people in the studio at once: errors, waiting times, and the server's memory.

`python benchmarks/load_studio.py --users 20 --minutes 5` starts `dear studio` as a person does and lets users
visit it through gradio's client: they load the page, look at heads, classify and search with their
images, train, watch, compare result files, and now and then send a file that is no image.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from measure.script import arguments

from dear.data import open_data

START = "from dear.cli import main; main()"


class Visit:
    """One user: a client and a list of things to do."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self.url, self.folder, self.rng = url, folder, random.Random(number)
        self.client = Client(url, verbose=False)

    def image(self) -> Any:
        """Another image than those of other users."""
        return handle_file(str(self.rng.choice(sorted(self.folder.glob("*.png")))))

    def page(self) -> None:
        """Load the page."""
        page = httpx.get(self.url, timeout=60)
        assert page.status_code == 200
        assert "dear studio" in page.text

    def heads(self) -> None:
        """The Heads tab."""
        self.client.predict(api_name="/heads")

    def look(self) -> None:
        """Where a head looks in an image."""
        self.client.predict(self.image(), api_name="/look")

    def classify(self) -> None:
        """The Classify tab."""
        names = self.rng.sample(["red star", "blue heart", "green arrow", "black ring", "teal square"], 3)
        cards, _, _ = self.client.predict(
            [self.image()], None, "\n".join(names), "a photo of a {}.", api_name="/classify"
        )
        assert names[0] in cards

    def search(self) -> None:
        """The Retrieve tab."""
        attribute = self.rng.choice(["Color", "Shape", "Texture"])
        _, page = self.client.predict(self.image(), attribute, "", api_name="/retrieve")
        assert page.count("<img ") == 8

    def train(self) -> None:
        """Start a training, or see that one runs already."""
        settings = ("world:textures", "dear", 2, 2, 1, "mini", "automatic", None)
        self.refused("a training is running", *settings, api_name="/train")

    def watch(self) -> None:
        """See how training goes, to its end."""
        self.client.predict(api_name="/watch")

    def compare(self) -> None:
        """The Compare tab."""
        self.client.predict([handle_file(str(self.folder / "cell.json"))], "", api_name="/compare_results")

    def wrong_file(self) -> None:
        """A text file where an image belongs."""
        text = handle_file(str(self.folder / "cell.json"))
        _, answer = self.client.predict(text, "Color", "", api_name="/retrieve")
        assert "is a text file, not an image" in answer

    def refused(self, sentence: str, *arguments: Any, api_name: str) -> bool:
        """Whether the studio says no, which it may do with this sentence only."""
        try:
            self.client.predict(*arguments, api_name=api_name)
        except AppError as error:
            if sentence not in str(error):
                raise
            return True
        return False

    DOES = (page, heads, look, classify, classify, search, train, watch, compare, wrong_file)


def cell() -> dict[str, Any]:
    """A result file for the Compare tab."""
    from dear.bench.cells import Cell
    from dear.bench.store import SCHEMA
    from dear.runs.spec import Spec

    one = Cell(protocol="base-to-novel", spec=Spec(method="zeroshot", data="world:textures", shots=16))
    result = {"modes": {"default": {"base": 0.6, "novel": 0.5, "hm": 0.54}}}
    return {"schema": SCHEMA, "key": one.key, "cell": one.document(), "result": result}


def resident(pid: int) -> tuple[float, int, int]:
    """MiB, open files and threads of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    count = {name: len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task")}
    return pages * 4096 / 2**20, count["fd"], count["task"]


def main() -> None:
    options = arguments(__doc__, users=20, minutes=5.0)
    with tempfile.TemporaryDirectory(prefix="dear-visits-") as name:
        folder = Path(name)
        task = open_data("world:emblems", "test")
        for number in range(20):
            task.image(number * 7).resize((300, 260)).save(folder / f"{number}.png")
        (folder / "cell.json").write_text(json.dumps(cell()))
        command = [sys.executable, "-c", START, "studio", "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        page = re.search(r"http://\S+", server.stderr.readline())
        assert page is not None
        complaints: list[str] = []
        threading.Thread(target=lambda: complaints.extend(server.stderr or ()), daemon=True).start()
        try:
            visit(page[0], folder, server.pid, options.users, 60 * options.minutes)
        finally:
            server.terminate()
            server.wait()
            print(f"lines on the server's standard error: {len(complaints)}")
            print("".join(complaints[:40]), end="")


def visit(url: str, folder: Path, pid: int, users: int, seconds: float) -> None:
    """Let the users in, and print what happened."""
    Visit(url, folder, 0).heads()  # roles and images are read once, before the crowd
    Visit(url, folder, 0).classify()
    took: dict[str, list[float]] = defaultdict(list)
    failed: list[str] = []
    began = time.monotonic()

    def one(number: int) -> None:
        user = Visit(url, folder, number)
        while time.monotonic() - began < seconds:
            does = user.rng.choice(Visit.DOES)
            start = time.monotonic()
            try:
                does(user)
            except Exception as error:
                failed.append(f"{does.__name__}: {type(error).__name__}: {str(error)[:200]}")
            took[does.__name__].append(time.monotonic() - start)
            time.sleep(user.rng.uniform(0.2, 1.0))

    crowd = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(users)]
    for thread in crowd:
        thread.start()
    minute = 0
    while any(thread.is_alive() for thread in crowd):
        time.sleep(1)
        if time.monotonic() - began >= 60 * (minute + 1) and minute < seconds // 60:
            minute += 1
            memory, files, threads = resident(pid)
            done = sum(map(len, took.values()))
            print(
                f"minute {minute}: {memory:6.1f} MiB, {files} files, {threads} threads, {done} actions",
                flush=True,
            )
    for name, times in sorted(took.items()):
        times.sort()
        print(
            f"{name:10} {len(times):5} times, median {times[len(times) // 2]:6.2f} s, most {times[-1]:6.2f} s"
        )
    print(f"{users} users, {sum(map(len, took.values()))} actions, {len(failed)} errors")
    print("\n".join(failed[:20]))


if __name__ == "__main__":
    main()
