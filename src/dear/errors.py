"""Errors that a user can cause and correct: one sentence each, naming the thing and what is needed.

Sentences are written in the words of the library: parameters and functions, never an option of the command
line. An error may carry a `hint`, a key that the command line turns into the option or command to use.
"""

from __future__ import annotations

from typing import ClassVar


class DearError(Exception):
    """Anything a user can cause and correct; the command line prints it as one line, without a stack trace.

    Args:
        message: what is wrong and what is needed, in library terms.
        hint: key of the remedy, such as "resume"; `dear.cli.hints` knows the sentence for each key.

    >>> DearError("the run was not completed", hint="resume").hint
    'resume'
    """

    status: ClassVar[int] = 2  #: exit status of the command: wrong use, unless the work itself failed

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(DearError):
    """Options that contradict each other or name something that does not exist."""


class DiskError(DearError):
    """A file cannot be written; an older file is unchanged."""

    status = 1


class Interrupted(DearError):  # noqa: N818 (a state, not a mistake)
    """The user pressed Ctrl-C; what was done is kept."""

    status = 130


class OutOfMemory(DearError):  # noqa: N818 (a state, not a mistake)
    """The device or the computer has too little memory for the task."""

    status = 1


class InputError(DearError):
    """A text or an image that cannot be used."""


class CheckpointError(DearError):
    """A backbone checkpoint that is missing, cut, of an unknown layout, or holds the wrong tensors."""


class DataError(DearError):
    """A folder, table or split that cannot be read as a dataset."""


class RoleError(DearError):
    """A role map that is malformed or belongs to other weights."""


class RunError(DearError):
    """A run folder that cannot be used, continued or loaded."""


class TrainingError(RunError):
    """Training that cannot go on."""

    status = 1


def reason_of(error: BaseException) -> str:
    """The first line of what an error of a library says, or its kind where it says nothing."""
    detail = str(error).strip()
    return detail.splitlines()[0] if detail else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the computer is out of memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError())
    (True, False)
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # PyTorch on the CPU
