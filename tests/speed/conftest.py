"""The benchmarks' shared code is tested here too; their scripts find it beside themselves."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
