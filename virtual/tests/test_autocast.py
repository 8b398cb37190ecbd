"""Mixed precision follows the rules that PyTorch's accelerators share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint

LOWER = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "conv1d": lambda x: F.conv1d(x.view(1, 8, 8), x.view(8, 8, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
}
FLOAT = {
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "sum": lambda x: x.sum(),
    "exp": lambda x: x.exp(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "pow": lambda x: x**2,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_under_autocast(dtype):
    x = torch.randn(8, 8, device="virtual")
    with torch.autocast("virtual", dtype=dtype):
        for name, function in LOWER.items():
            assert function(x).dtype == dtype, name
        for name, function in FLOAT.items():
            assert function(x).dtype == torch.float32, name
            assert function(x.to(dtype)).dtype == torch.float32, name
        assert (x + x.to(dtype)).dtype == torch.float32
        assert torch.cat([x, x.to(dtype)]).dtype == torch.float32
        assert F.gelu(x.to(dtype)).dtype == dtype
        with torch.autocast("virtual", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_the_cpus_autocast_is_another(same):
    x = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x.to("virtual") @ x.to("virtual")).dtype == torch.float32
    with torch.autocast("virtual", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
        product = x.to("virtual") @ x.to("virtual")
    same(product, x.bfloat16() @ x.bfloat16())


def test_the_default_dtype_is_asked_for():
    assert torch.amp.is_autocast_available("virtual")
    with torch.autocast("virtual"):
        assert (torch.ones(2, 2, device="virtual") @ torch.ones(2, 2, device="virtual")).dtype in (
            torch.bfloat16,
            torch.float16,
        )
    with (
        pytest.warns(UserWarning, match=r"not supported|does not support|not support"),
        torch.autocast("virtual", dtype=torch.float64),
    ):
        pass


def test_a_scaler_skips_steps_that_overflow():
    scaler = torch.amp.GradScaler("virtual", init_scale=2.0**10, growth_interval=2)
    model = nn.Linear(4, 1).to("virtual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    x = torch.ones(2, 4, device="virtual")

    def step(factor: float) -> None:
        with torch.autocast("virtual", dtype=torch.float16):
            loss = model(x).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(float("inf"))
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**9
    step(1.0)
    assert torch.allclose(model.weight, before - 0.1)
    step(1.0)
    assert scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_with_either_optimizer(fused):
    scaler = torch.amp.GradScaler("virtual", init_scale=4.0)
    p = torch.zeros(3, device="virtual", requires_grad=True)
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=fused, foreach=not fused)
    p.grad = torch.full_like(p, float("inf"))
    scaler.scale(torch.zeros((), device="virtual"))
    scaler.step(optimizer)
    scaler.update()
    assert p.detach().abs().sum().item() == 0
    p.grad = torch.ones_like(p)
    scaler.step(optimizer)
    assert p.detach().abs().sum().item() > 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_checkpoint_recomputes_with_the_same_dropout_and_dtype(same, dtype):
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(F.linear(x, weight)), 0.3) @ weight

    weight = torch.randn(16, 16, device="virtual", requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 64, device="virtual").view(4, 16).requires_grad_()
        weight.grad = None
        with torch.autocast("virtual", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            torch.rand(7, device="virtual")  # what is drawn in between must not matter
            y.square().sum().backward()
        gradients.append([x.grad, weight.grad, torch.rand(3, device="virtual")])
    same(*gradients)
