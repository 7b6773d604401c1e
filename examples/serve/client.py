"""Ask a running `dear serve` with Python's standard library alone.

python examples/serve/client.py http://127.0.0.1:8000 pets photo.jpg
"""

from __future__ import annotations

import base64
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def classify(address: str, model: str, files: list[str], top: int = 3, key: str | None = None) -> Any:
    """The service's answer for some image files.

    Raises:
        SystemExit: the service refused; its sentence is shown.
    """
    images = [base64.b64encode(Path(file).read_bytes()).decode() for file in files]
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"images": images, "top": top}).encode()
    request = urllib.request.Request(f"{address}/v1/models/{model}/classify", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{error.code}: {json.load(error)['error']['message']}") from None


if __name__ == "__main__":
    address, model, *files = sys.argv[1:]
    answers = classify(address, model, files, key=os.environ.get("DEAR_KEY"))["answers"]
    for file, answer in zip(files, answers, strict=True):
        named = ", ".join(f"{one['name']} {one['probability']:.1%}" for one in answer["classes"])
        print(f"{file}: {named}")
