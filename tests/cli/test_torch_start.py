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


USES = (
    "assert torch.export.export(model, (x,)).module()(x).shape == (2, 3)",
    "assert torch.compile(model, backend='aot_eager')(x).shape == (2, 3)",
    "import torch._decomp; assert len(torch._decomp.decomposition_table) > 500",
    "import torch._meta_registrations; torch.linalg.svd(x.to('meta'))",
    "import torch._refs.linalg; assert torch._refs.linalg.norm(x) == 8**0.5",
    "torch.Generator(); import torch._prims; torch.rand(2, generator=torch.Generator().manual_seed(1))",
)
FORKED = """
import os, traceback
for use in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            exec(use)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def used() -> tuple[dict[str, str], str]:
    """The exit status of each use, in a fork of a process that was started this way; what they said."""
    words = [sys.executable, "-c", START + FORKED, *USES]
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(USES, done.stdout.split(), strict=True)), done.stderr


@pytest.mark.parametrize("use", USES)
def test_what_was_left_out_is_loaded_once_and_works(use: str, used: tuple[dict[str, str], str]) -> None:
    assert used[0][use] == "0", used[1]


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
