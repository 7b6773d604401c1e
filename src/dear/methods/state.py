"""Loads learned tensors into a method: all are checked first, then all are loaded or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dear.errors import RunError


def load_state(
    module: nn.Module,
    state: Mapping[str, Tensor],
    flexible: Mapping[str, tuple[int, ...]],
    owner: str,
    source: str,
) -> None:
    """Give a module's parameters and buffers the values of `state`.

    Args:
        module: whose tensors change.
        state: tensors by name.
        flexible: the shapes expected of those tensors that may have another shape than the module's own.
        owner: what messages call the module.
        source: where the state comes from, for messages.

    Raises:
        RunError: naming the tensors that are missing, surplus or of another shape; nothing is changed.
    """
    own = module.state_dict(keep_vars=True)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    shapes |= {name: torch.Size(shape) for name, shape in flexible.items()}
    complaints = [f"{name} is missing" for name in own if name not in state]
    complaints += [f"{name} is not part of the method {owner!r}" for name in state if name not in own]
    both = [(name, tensor, state[name]) for name, tensor in own.items() if name in state]
    complaints += [
        f"{name} is {list(new.shape)} where {list(shapes[name])} is expected"
        for name, _, new in both
        if new.shape != shapes[name]
    ]
    complaints += [
        f"{name} is {str(new.dtype).removeprefix('torch.')}, another kind of number than expected"
        for name, tensor, new in both
        if new.is_floating_point() != tensor.is_floating_point()
    ]
    if complaints:
        raise RunError(f"{source} does not fit: {'; '.join(complaints)}")
    for name, tensor in own.items():
        if tensor.shape != shapes[name]:  # the tensor object stays: an optimizer may hold it
            tensor.data = tensor.data.new_zeros(shapes[name])
    module.load_state_dict(dict(state))
