"""Small random backbones shared by the tests of heads."""

import pytest
import torch
from heads_oracles import tiny_clip


@pytest.fixture(params=["quick_gelu", "gelu"])
def clip(request):
    return tiny_clip(request.param)


@pytest.fixture
def images():
    return torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
