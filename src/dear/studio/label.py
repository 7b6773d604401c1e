"""The Label tab: labeling pages (`dear label start`) on folders of this computer."""

from __future__ import annotations

from pathlib import Path

from dear.errors import UsageError
from dear.runs.class_lists import split_class_list
from dear.studio.state import StudioState
from dear.tasks.labeling.server import LabelingServer, serving
from dear.tasks.labeling.start import start_session
from dear.utils.progress import Progress


class Labeler:
    """Labeling pages of a studio, one per pool and table of labels; they end with the studio."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self._servers: dict[tuple[str, Path], LabelingServer] = {}

    def start(self, pool: str, classes: str, out: str, progress: Progress | None = None) -> LabelingServer:
        """The page on the images of a folder or table; answers go to the table `out`.

        Raises:
            UsageError: the studio serves other computers, or a field is empty.
            DataError: the folder holds no readable image.
        """
        if not self.state.local:
            raise UsageError("labeling needs a studio on this computer, got one that serves others")
        pool = pool.strip()
        if not pool or not out.strip():
            raise UsageError("labeling needs the images and the table of labels, got an empty field")
        key = (pool, Path(out.strip()).expanduser().absolute())
        names = split_class_list(classes)
        if key not in self._servers:
            session, _ = start_session(
                pool, key[1], classes=names, backbone=self.state.clip, progress=progress
            )
            self._servers[key] = self.state.servers.enter_context(serving(session))
        session = self._servers[key].session
        for name in names:
            if name not in session.classes:
                session.add_class(name)
        return self._servers[key]
