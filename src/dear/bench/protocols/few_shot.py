"""Few-shot classification: train on k images of every class, test on every class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dear.bench.protocols import SEEDS_NOTE, Figures, Protocol
from dear.bench.session import Session
from dear.bench.tables import Entry, Line, Sheet, SheetRow, average, group_lines


class FewShot(Protocol):
    """Accuracy over all classes against the number of shots."""

    name, title = "few-shot", "Few-shot"
    shots: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16)
    shots_are_columns: ClassVar[bool] = True

    def run(self, session: Session) -> dict[str, Any]:
        """Accuracy over all classes in every mode."""
        model = session.fit(self.training(session.data), keep=True)
        tested = session.test(model, session.open("test"))
        modes = {} if tested is None else tested.accuracy
        return session.finish({mode: {"accuracy": accuracy} for mode, accuracy in modes.items()})

    def table(self, lines: Sequence[Line]) -> Sheet:
        """Accuracy of every method on every dataset, and on their average: a column per number of shots."""
        shots = sorted({line.shots for line in lines})
        datasets = list(dict.fromkeys(line.dataset for line in lines))
        rows: list[SheetRow] = []
        if len(datasets) > 1:
            for (method, mode), method_lines in group_lines(lines).items():
                entries: list[Entry] = []
                for count in shots:
                    same_shots = [line for line in method_lines if line.shots == count]
                    whole = len(same_shots) == len(datasets)
                    entries.append(average(same_shots).figure("accuracy") if whole else None)
                rows.append(SheetRow(("Average", method, mode), tuple(entries)))
        for dataset in datasets:
            for (method, mode), method_lines in group_lines(
                line for line in lines if line.dataset == dataset
            ).items():
                at = {line.shots: line.figure("accuracy") for line in method_lines}
                rows.append(SheetRow((dataset, method, mode), tuple(at.get(count) for count in shots)))
        columns = tuple(
            f"{count} shot{'s' if count > 1 else ''}" if count else "all images" for count in shots
        )
        return Sheet(self.title, ("Dataset", "Method", "Mode"), columns, tuple(rows), (SEEDS_NOTE,))

    def figures(self, lines: Sequence[Line]) -> Figures:
        """Accuracy against shots."""
        from dear.bench import plots

        sentence = "Accuracy over all classes; whiskers are the standard deviation over seeds."
        return [("Accuracy against shots", sentence, plots.shot_curves(lines))]
