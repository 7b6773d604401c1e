"""`make fuzz`: every reader, each in a process of its own, at least as many cases in all as asked for.

    python tests/fuzz/run_fuzz.py --cases 100000 --seed 1
    python tests/fuzz/run_fuzz.py --only role-map,table-csv --cases 5000
    python tests/fuzz/run_fuzz.py --replay build/fuzz/role-map-0123456789ab.bin

An input with a forbidden outcome is kept in --keep with what it did, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "helpers"))

import readers  # noqa: E402 (found by the lines above)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="cases in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names of readers, comma-separated")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--replay", type=Path, help="read one kept input again")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.replay is not None:
        return replay(asked.replay)
    if asked.child is not None:
        return child(asked.only, asked.child, asked.seed, asked.keep)
    names = [name for name in asked.only.split(",") if name] or list(readers.NAMES)
    if unknown := set(names) - set(readers.NAMES):
        parser.error(f"no reader {', '.join(sorted(unknown))}; readers: {', '.join(sorted(readers.NAMES))}")
    return parent(names, asked.cases, asked.seed, asked.keep, asked.jobs)


def parent(names: list[str], cases: int, seed: int, keep: Path, jobs: int) -> int:
    """Run all readers and print a table."""
    began = time.monotonic()
    whole = sum(map(readers.share, names))

    def one(name: str) -> dict:
        return _spawn(name, math.ceil(cases * readers.share(name) / whole), seed, keep)

    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(one, names))
    head = "".join(f"{word:>9}" for word in ("cases", "answered", "refused", "lines", "kept", "seconds"))
    print(f"{'reader':18}{head}  failures")
    for row in sorted(rows, key=lambda row: str(row["name"])):
        print(
            f"{row['name']:18}{row['cases']:9,}{row['answered']:9,}{row['refused']:9,}{row['lines']:9}"
            f"{row['kept']:9}{row['seconds']:9.1f}  {len(row['failures'])}"
        )
    total = {key: sum(row[key] for row in rows) for key in ("cases", "answered", "refused")}
    failures = [line for row in rows for line in row["failures"]]
    print(
        f"{len(rows)} readers, {total['cases']:,} cases: {total['answered']:,} answered, "
        f"{total['refused']:,} refused with a sentence, {len(failures)} failures; seed {seed}, "
        f"{time.monotonic() - began:.0f} s"
    )
    for line in failures[:40]:
        print(f"  {line}")
    return 1 if failures else 0


def _spawn(name: str, cases: int, seed: int, keep: Path) -> dict:
    words = ["--only", name, "--child", str(cases), "--seed", str(seed), "--keep", str(keep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(prefix="dear-fuzz-") as folder:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            env={**environment, "DEAR_FUZZ_FOLDER": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        current = Path(folder) / "current"
        keep.mkdir(parents=True, exist_ok=True)
        kept = keep / f"{name}-crash.bin"
        kept.write_bytes(current.read_bytes() if current.exists() else b"")
        kept.with_suffix(".txt").write_text(f"status {done.returncode}\n{done.stderr}")
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        fault = f"{kept}: the process died with status {done.returncode} ({last})"
    empty = dict.fromkeys(("cases", "answered", "refused", "lines", "kept"), 0)
    return {"name": name, **empty, "seconds": 0.0, "failures": [fault]}


def child(name: str, cases: int, seed: int, keep: Path) -> int:
    """Fuzz one reader and print the result as one line of JSON."""
    import fuzzing
    import torch

    torch.set_num_threads(1)
    folder = Path(os.environ["DEAR_FUZZ_FOLDER"])
    target = readers.find(name)(folder)
    fuzzing.limit_memory()
    result = fuzzing.fuzz(target, max(cases, len(target.seeds)), seed, folder, keep, fuzzing.Watch())
    print(json.dumps(result.__dict__))
    return 0


def replay(path: Path) -> int:
    """Read a kept input again; the traceback is shown."""
    name = path.stem.rpartition("-")[0]
    with tempfile.TemporaryDirectory(prefix="dear-fuzz-") as folder:
        readers.find(name)(Path(folder)).read(path.read_bytes())
    print(f"{path}: read without a fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
