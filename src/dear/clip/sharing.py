"""Modules that share weights with other modules: `dataclasses.replace` for `nn.Module`.

Every variant of a backbone (`dear.clip.variant`) and every traced or exported copy is created here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def replace(module: nn.Module, kind: type[M], **parts: Any) -> M:
    """A module of class `kind` with the parameters, buffers, children and attributes of `module`.

    Only `parts` differ. Parameters and children are the same objects, so nothing is copied; hooks are not
    carried over.

    >>> linear = nn.Linear(2, 2)
    >>> other = replace(linear, nn.Linear, bias=None)
    >>> other.weight is linear.weight, other.bias, linear.bias is None
    (True, None, False)
    """
    other = kind.__new__(kind)
    nn.Module.__init__(other)
    other.training = module.training
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    parameters = dict(module.named_parameters(recurse=False))
    buffers = dict(module.named_buffers(recurse=False))
    for name, value in {**attributes, **parameters, **dict(module.named_children()), **parts}.items():
        if name not in buffers:
            setattr(other, name, value)
    for name, buffer in buffers.items():
        other.register_buffer(name, parts.get(name, buffer))
    return other


def tensor_stamp(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Cache key of the values of tensors: it changes when one is replaced or written to in place.

    >>> weight = nn.Linear(2, 2).bias.data
    >>> before = tensor_stamp([weight])
    >>> tensor_stamp([weight]) == before, tensor_stamp([weight.add_(1)]) == before
    (True, False)
    """
    return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)


def map_tensors(module: M, change: Callable[[nn.Module, Tensor], Tensor]) -> M:
    """A copy whose parameters and buffers are `change(owner, tensor)` of the original's.

    Where `change` returns the tensor itself, the copy shares it; unchanged modules are shared as well.

    >>> linear = nn.Sequential(nn.Linear(2, 2))
    >>> map_tensors(linear, lambda owner, tensor: tensor) is linear
    True
    >>> map_tensors(linear, lambda owner, tensor: tensor.half())[0].weight.dtype
    torch.float16
    """
    parts: dict[str, Any] = {}
    for name, child in module.named_children():
        parts[name] = map_tensors(child, change)
    for name, parameter in module.named_parameters(recurse=False):
        tensor = change(module, parameter)
        same = tensor is parameter
        parts[name] = parameter if same else nn.Parameter(tensor.detach(), parameter.requires_grad)
    for name, buffer in module.named_buffers(recurse=False):
        parts[name] = change(module, buffer)
    if all(part is getattr(module, name) for name, part in parts.items()):
        return module
    return replace(module, type(module), **parts)
