"""Compare a wheel with the sources it should hold: `python scripts/compare_wheel.py WHEEL SDIST`."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

wheel, sdist = sys.argv[1:]
tracked = subprocess.run(["git", "ls-files", "src/dear"], capture_output=True, text=True, check=False)
names = tracked.stdout.splitlines() or [str(path) for path in Path("src/dear").rglob("*.*")]
names = [name for name in names if Path(name).is_file() and "__pycache__" not in name]
archive = zipfile.ZipFile(wheel)
digests = {
    f"src/{name}": hashlib.sha256(archive.read(name)).digest()
    for name in archive.namelist()
    if name.startswith("dear/")
}
wrong = [name for name in names if digests.get(name) != hashlib.sha256(Path(name).read_bytes()).digest()]
surplus = [name for name in archive.namelist() if not name.startswith(("dear/", "dear_vlm-"))]
if wrong or surplus:
    sys.exit(f"{wheel}: missing or different: {wrong[:5]}; not expected: {surplus[:5]}")
for path in (wheel, sdist):
    print(f"{Path(path).name}: {Path(path).stat().st_size / 1e6:.2f} MB")
count = len(tarfile.open(sdist).getnames())
data = sum(not name.endswith(".py") for name in names)
print(
    f"the wheel, built from the sdist of {count} files, holds all {len(names)} sources, {data} of them data"
)
