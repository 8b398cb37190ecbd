"""Losses and batches of every kind that plain PyTorch accepts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.small_models import WIDTH, Model, assert_equal_to_plain, loss


def of_one_element(model, batch):
    return loss(model, batch)[None]


class LossModule(nn.Module):
    def forward(self, model, batch):
        return loss(model, batch)


@pytest.mark.parametrize("function", [of_one_element, LossModule()], ids=["one element", "a module"])
def test_losses(function, device):
    for micro_batches in (1, 2):
        assert_equal_to_plain(Model, function, None, micro_batches, device)


class OwnLoss(Model):
    def forward(self, x):
        value = super().forward(x).pow(2).mean()
        return SimpleNamespace(loss=value)


def own_loss(model, x):
    return model(x).loss


@pytest.mark.parametrize("options", [{}, {"loss": own_loss}], ids=["the model's loss", "a function"])
def test_a_batch_that_is_a_tensor(options, device):
    torch.manual_seed(0)
    model, batch = OwnLoss(), torch.randn(8, WIDTH)
    plain = model(batch).loss
    expected = torch.autograd.grad(plain, list(model.parameters()))
    with Engine(model, device=device, **options) as engine:
        assert engine.forward_backward(batch, 4).item() == pytest.approx(plain.item(), rel=1e-5)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
