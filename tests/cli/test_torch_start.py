"""A PyTorch that was imported without its tracing parts: they come when they are asked for."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from dear.cli.torch_start import _module_of
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


def ended(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that starts PyTorch quickly, runs some code and then says that it is still there."""
    code = START + "from dear.cli.torch_start import exit_early\n" + code + "\nprint('still there')"
    return subprocess.run([sys.executable, "-c", code], text=True, check=False, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU all of PyTorch is imported")
def test_an_early_exit_does_what_an_exit_owes() -> None:
    done = ended(
        "import atexit\natexit.register(lambda: print('exit function'))\nprint('answer')\nexit_early(0)",
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (0, "answer\nexit function\n"), done.stderr


@pytest.mark.parametrize(
    "reason",
    [
        "exit_early(2)",
        "exit_early('a message')",
        "import threading; t = threading.Event(); threading.Thread(target=t.wait).start()\n"
        "exit_early(0)\nt.set()",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): exit_early(0)",
        "import torch.export; exit_early(0)",
    ],
)
def test_a_process_with_something_left_to_do_ends_as_usual(reason: str) -> None:
    done = ended(reason, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk to write to")
def test_output_that_cannot_be_written_is_told_of() -> None:
    with open("/dev/full", "w") as full:
        done = ended("print('answer')\nexit_early(0)", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert "No space left" in done.stderr


def test_modules_of_frames_are_found_as_before() -> None:
    code = "import inspect\nown = inspect.getmodule\n" + START + "assert inspect.getmodule is own"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for frame in (sys._getframe(), sys._getframe(1)):
        assert _module_of(inspect.getmodule, frame) is inspect.getmodule(frame)
    assert _module_of(inspect.getmodule, pytest.raises) is inspect.getmodule(pytest.raises)
