"""New classes one by one: DeAR against zero-shot, from the cosines that `dear_search.py --scores` keeps.

    python research/dear_classes.py scores/DescribableTextures-strong-*.pt

A row per new class, means over the files in percent: accuracy of DeAR's fused answer, of zero-shot, and the
class that takes most of the images DeAR lost.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from measure.script import markdown, parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    files = [torch.load(path) for path in parser.parse_args().files]
    half, classes = files[0]["half"], files[0]["classes"]
    lines = []
    for number in range(half, len(classes)):
        right, before, taken = list[float](), list[float](), Counter[str]()
        for one in files:
            rows = one["labels"] == number
            ours, theirs = (half + one[name][rows][:, half:].argmax(dim=1) for name in ("fused", "zero_shot"))
            right.append(float((ours == number).double().mean()))
            before.append(float((theirs == number).double().mean()))
            lost = ours[(ours != number) & (theirs == number)]
            taken.update(classes[place] for place in lost.tolist())
        own, zero_shot = (100 * sum(values) / len(values) for values in (right, before))
        most = taken.most_common(1)[0][0] if taken else ""
        lines.append((classes[number], own, zero_shot, f"{own - zero_shot:+.1f}", most))
    head = ("new class", "DeAR", "zero-shot", "difference", "most of the lost images are called")
    print(markdown(head, lines))


if __name__ == "__main__":
    main()
