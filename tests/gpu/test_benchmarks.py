"""Every benchmark that needs a GPU runs there, on the smallest work it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dear

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.gpu
SHORT = {
    "step compare": "--batch 4 --classes 10 --repeats 2 --shape ViT-B-32 --one-by-one",
    "step presets": "--batch 4 --classes 10 --repeats 2",
    "step losses": "--shape ViT-B-32 --steps 3 --classes 10 --precision bfloat16",
    "step growth": "--shape ViT-B-32 --repeats 1",
    "step kernels": "--batch 4 --classes 10 --rows 5",
    "inference": "--batch 4 --compile --classes 10 --repeats 2",
    "images feed": "--images 16 --workers 2 --device cuda",
    "mechanisms": "--batch 4 --classes 10 --repeats 2 --files 16 --compiled",
    "roles": "--model ViT-B-32 --images 64 --phrases 100 --literal-images 32 --literal-heads 1",
    "against": f"--batch 4 --classes 10 --inference 1 --repeats 1 --turns 2 --base {FOLDER.parent}",
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_of(name: str, tmp_path: Path) -> None:
    script, *options = name.split()
    path = os.pathsep.join([str(Path(dear.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *options, *SHORT[name].split()],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.strip()
