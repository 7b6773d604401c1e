"""A PyTorch that was imported without its tracing parts: they come when they are asked for."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from dear.methods import list_methods

START = (
    "import sys\nfrom dear.cli.torch_start import import_torch\nimport_torch()\nimport torch\n"
    "if not torch.cuda.is_available(): assert 'torch._decomp' not in sys.modules\n"
    "x = torch.ones(2, 4)\nmodel = torch.nn.Linear(4, 3)\n"
)


@pytest.mark.parametrize(
    "use",
    [
        "assert torch.export.export(model, (x,)).module()(x).shape == (2, 3)",
        "assert torch.compile(model, backend='aot_eager')(x).shape == (2, 3)",
        "import torch._decomp; assert len(torch._decomp.decomposition_table) > 500",
        "import torch._meta_registrations; torch.linalg.svd(x.to('meta'))",
        "import torch._refs.linalg; assert torch._refs.linalg.norm(x) == 8**0.5",
        "torch.Generator(); import torch._prims; torch.rand(2, generator=torch.Generator().manual_seed(1))",
    ],
)
def test_what_was_left_out_is_loaded_once_and_works(use: str) -> None:
    done = subprocess.run([sys.executable, "-c", START + use], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


ANSWERS = """
import torch
from PIL import Image
import dear
from dear.methods import build_method, find_method, list_methods
from dear.runs.model import Model
image, clip = Image.radial_gradient("L").convert("RGB"), dear.load("mini")
for name in list_methods():
    torch.manual_seed(0)
    roles = dear.RoleMap.table2() if find_method(name).uses_roles else None
    method = build_method(name, clip, ["red fox", "wolf"], roles=roles, allow_other_roles=True)
    print(name, Model(method).answers([image])[0].classes)
"""


def test_every_method_answers_the_same() -> None:
    start = "from dear.cli.torch_start import import_torch\nimport_torch()\n"
    done = subprocess.run(
        [sys.executable, "-c", start + ANSWERS], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with contextlib.redirect_stdout(io.StringIO()) as said:  # this process has a whole PyTorch
        exec(ANSWERS, {})
    assert "torch._decomp" in sys.modules
    assert done.stdout == said.getvalue()
    assert done.stdout.count("red fox") == len(list_methods())
