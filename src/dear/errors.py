"""What can go wrong by a user's hand: one sentence each, naming the thing and what to do."""

from typing import ClassVar


class DearError(Exception):
    """Anything a user can cause and mend; the command line prints it as one line, without a stack trace."""

    status: ClassVar[int] = 2  #: exit status of the command: wrong use, unless the work itself failed


class UsageError(DearError):
    """Options that contradict each other or name something that does not exist."""


class DiskError(DearError):
    """A file could not be written; what was there before is unchanged."""

    status = 1


class Interrupted(DearError):  # noqa: N818 (a state, not a mistake)
    """The user pressed Ctrl-C; what was done is kept."""

    status = 130


class OutOfMemory(DearError):  # noqa: N818 (a state, not a mistake)
    """The device or the computer has too little memory for what was asked."""

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
