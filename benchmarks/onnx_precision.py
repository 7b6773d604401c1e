"""Speed of exported models in float16 and int8 compared with float32, and the accuracy that they lose.

    dear export RUN --onnx full.onnx
    dear export RUN --onnx int8.onnx --precision int8
    python benchmarks/onnx_precision.py --full full.onnx --small int8.onnx --csv FILE

The two files take turns; times are processor times, for a machine that does other work as well. The loss is
the one that the file stores.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from measure.script import arguments, record

from dear.export.runtime import OnnxModel


def main() -> None:
    options = arguments(__doc__, full=[""], small=[""], batch=[1, 16], repeats=9, threads=2, csv=Path)
    for full, small in zip(options.full, options.small, strict=True):
        models = [OnnxModel(path, threads=options.threads) for path in (full, small)]
        about = models[1].metadata
        assert about.loss is not None, f"{small}: is a float32 file"
        for batch in options.batch:
            size = about.preprocessing.size
            pixels = np.random.default_rng(0).standard_normal((batch, 3, size, size), dtype=np.float32)
            times: list[list[float]] = [[], []]
            for _ in range(options.repeats):
                for model, seconds in zip(models, times, strict=True):
                    start = time.process_time()
                    model.run(pixels)
                    seconds.append(time.process_time() - start)
            before, after = (float(np.median(seconds)) for seconds in times)
            record(
                options.csv,
                [
                    {
                        "dataset": about.loss.data,
                        "method": about.method,
                        "backbone": Path(about.backbone).name,
                        "precision": about.precision,
                        "batch": batch,
                        "threads": options.threads,
                        "ms_float32": round(1000 * before, 1),
                        "ms": round(1000 * after, 1),
                        "times_faster": round(before / after, 2),
                        "images": about.loss.images,
                        "accuracy_float32": round(100 * about.loss.float32, 2),
                        "points_lost": round(about.loss.points, 2),
                        "same_answers": round(100 * about.loss.same, 1),
                        "mb_float32": round(Path(full).stat().st_size / 1e6, 1),
                        "mb": round(Path(small).stat().st_size / 1e6, 1),
                    }
                ],
            )


if __name__ == "__main__":
    main()
