"""Use an installed dear as a stranger would: the help of every command, an answer, one request to the service.

    python use_package.py DEMO

with the Python of the environment; DEMO is the folder of `dear demo --quick`, whose run has the embedded backbone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from typer.main import get_command

from dear.cli import build_app
from dear.data import open_data

DEAR = str(Path(sys.executable).with_name("dear"))
PORT = 8765


def commands(group: object, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command, groups first."""
    inner = getattr(group, "commands", {})
    return [words, *(path for name, child in inner.items() for path in commands(child, (*words, name)))]


def seconds(*words: str) -> float:
    """Time of a command, start of the process included; raises if it fails."""
    start = time.perf_counter()
    subprocess.run([DEAR, *words], check=True, capture_output=True, timeout=300)
    return time.perf_counter() - start


def main() -> None:
    """Everything, with times."""
    demo = Path(sys.argv[1])
    image = Path("photo.png").absolute()
    open_data("world:textures", "test").image(0).save(image)
    helps = {" ".join(words): seconds(*words, "--help") for words in commands(get_command(build_app()))}
    slowest = max(helps, key=helps.get)
    print(
        f"--help of {len(helps)} commands; dear --help {seconds('--help'):.2f} s, slowest {slowest}: {helps[slowest]:.2f} s"
    )
    times = [seconds("predict", str(demo / "run-textures-quick"), str(image)) for _ in range(3)]
    print(f"predict, one image: {min(times):.2f} s (three runs: {', '.join(f'{t:.2f}' for t in times)})")
    words = [DEAR, "serve", str(demo), "--backbone", "mini", "--port", str(PORT)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        print(f"serve answers: {request(image)}")
    finally:
        server.terminate()
        server.wait(60)


def request(image: Path) -> str:
    """The answer of the service to one image, waiting up to two minutes for its start."""
    address = f"http://127.0.0.1:{PORT}/v1/models/run-textures-quick/classify"
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="photo.png"\r\n\r\n'
    body += image.read_bytes() + b"\r\n--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    until = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as answer:
                return str(json.load(answer))[:200]
        except urllib.error.HTTPError as error:
            sys.exit(f"{address}: {error.code} {error.read()[:300]!r}")
        except OSError:
            if time.monotonic() > until:
                sys.exit(f"{address}: no answer within two minutes")
            time.sleep(0.5)


if __name__ == "__main__":
    main()
