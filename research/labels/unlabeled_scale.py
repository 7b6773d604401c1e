"""How time and memory of the functions on unlabeled images grow with their number.

python research/labels/unlabeled_scale.py --images 1000,10000,100000 --device cpu --threads 1 --out scale.csv

Features are synthetic: 100 classes, 512 values, 400 labels. Each size runs in a separate process.
Memory is the peak in addition to the features (on a GPU, what PyTorch allocated there).
"""

from __future__ import annotations

import argparse
import csv
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from dear.unlabeled import choose_typical, fit_semi_supervised_probe

CLASSES, WIDTH, LABELS = 100, 512, 400


def measure(images: int, device: str, choose: bool) -> list[list[object]]:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    truth = torch.randint(CLASSES, (images,), generator=generator)
    features = torch.empty(images, WIDTH)
    for rows in torch.arange(images).split(8192):
        noise = torch.randn(len(rows), WIDTH, generator=generator)
        features[rows] = F.normalize(centers[truth[rows]] + 4 * noise, dim=1)
    texts = 50 * F.normalize(centers + torch.randn(CLASSES, WIDTH, generator=generator), dim=1)
    labels = torch.full((images,), -1)
    labels[:LABELS] = truth[:LABELS]
    features, texts, labels, truth = (value.to(device) for value in (features, texts, labels, truth))
    records = []

    def record(stage: str, function: object) -> object:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before_gpu = torch.cuda.memory_allocated()
        began, used = time.perf_counter(), time.process_time()
        value = function()  # type: ignore[operator]
        if device != "cpu":
            torch.cuda.synchronize()
        wall, processor = time.perf_counter() - began, time.process_time() - used
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        if device != "cpu":
            memory = (torch.cuda.max_memory_allocated() - before_gpu) / 2**20
        records.append(
            [
                device,
                torch.get_num_threads(),
                images,
                stage,
                round(wall, 1),
                round(processor, 1),
                round(memory),
            ]
        )
        return value

    fit = record("probe with unlabeled images", lambda: fit_semi_supervised_probe(features, labels, texts))
    right = [
        float((p.logits(features[LABELS:]).argmax(dim=1) == truth[LABELS:]).float().mean())
        for p in (fit.labeled_only, fit.probe)
    ]
    for row in records:
        row += [round(100 * value, 1) for value in right]
    if choose:
        unit = F.normalize(features - features.mean(dim=0), dim=1)
        record("choice of 100 images", lambda: choose_typical(unit, 100, classes=CLASSES))
        records[-1] += ["", ""]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", default="1000,10000,100000")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="-")
    parser.add_argument("--no-choice", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = [int(size) for size in args.images.split(",")]
    if args.one:
        csv.writer(sys.stdout, lineterminator="\n").writerows(
            measure(sizes[0], args.device, not args.no_choice)
        )
        return
    head = "device,threads,images,stage,seconds,processor_seconds,more_mib,labeled_only,with_unlabeled\n"
    lines = [head]
    for size in sizes:
        words = [sys.executable, __file__, "--one", "--images", str(size), "--device", args.device]
        words += ["--threads", str(args.threads)] + ["--no-choice"] * args.no_choice
        lines.append(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        print(lines[-1], end="", flush=True)
        if args.out != "-":
            with open(args.out, "w", encoding="utf-8") as file:
                file.write("".join(lines))


if __name__ == "__main__":
    main()
