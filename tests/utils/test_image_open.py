"""Large images are read or refused without Pillow's own warnings."""

import subprocess
import sys
from pathlib import Path

from PIL import Image


def test_pillows_warning_of_large_images_does_not_leak(tmp_path: Path) -> None:
    Image.new("1", (12_000, 8_000)).save(tmp_path / "large.png")
    path = str(tmp_path / "large.png")
    program = f"from dear.images.open import open_image; print(open_image({path!r}).size)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("(12000, 8000)", "")
