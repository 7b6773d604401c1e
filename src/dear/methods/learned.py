"""Learned tensors: how they are initialized, and how saved ones are loaded.

Random numbers come from a method's own generator, in float64. Loading checks all tensors first: then all of
them are taken, or none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dear.errors import RunError


def normal(generator: torch.Generator, *shape: int, std: float = 0.02) -> Tensor:
    """Normal random numbers around 0; 0.02 is the deviation of CLIP's token embeddings."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * std


def uniform(generator: torch.Generator, *shape: int, inputs: int) -> Tensor:
    """Uniform within 1/sqrt(inputs): how PyTorch initializes the weight and bias of a linear layer.

    >>> float(uniform(torch.Generator().manual_seed(0), 1000, inputs=4).abs().max()) < 0.5
    True
    """
    bound = max(1, inputs) ** -0.5
    return torch.rand(*shape, generator=generator, dtype=torch.float64).mul(2).sub(1).mul(bound)


def linear(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Weight [..., out, in] and bias [..., out] of a linear layer, as PyTorch initializes them.

    >>> [list(t.shape) for t in linear(torch.Generator(), 3, 4)]
    [[3, 4], [3]]
    """
    return uniform(generator, *shape, inputs=shape[-1]), uniform(generator, *shape[:-1], inputs=shape[-1])


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
