"""Units that store tensors with their graph, while graphs of calls are kept until their backward."""

import copy

import pytest
import torch
from torch import nn

from ferryman import Engine
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made


class Storing(Block):
    """Stores its output if there is a graph, and then from the second step on."""

    since = 0
    step = 0

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad and self.step >= self.since:
            self.looked = torch.tanh(y)
        return y


class StoringLate(Storing):
    since = 1


class Gate(Storing):
    """Has no parameters on the way of what it stores."""

    def forward(self, x):
        y = torch.tanh(x)
        if y.requires_grad:
            self.looked = y.exp()
        return x + self.linear(y)


class Using(Model):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        looked = getattr(self.blocks[0], "looked", None)
        return self.head(x if looked is None else x + 0.5 * looked)


def using(kind):
    return type("Using", (Using,), {"block": kind})


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("memory", [None, "16MiB"])
@pytest.mark.parametrize("kind", [Storing, StoringLate, Gate])
def test_what_units_store_has_its_gradient(kind, memory, recompute, device):
    model, plain = made(using(kind), None), made(using(kind), None).to(device)
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    memory = None if device.type == "cpu" else memory
    with Engine(model, mine, device=device, loss=loss, memory=memory, recompute=recompute) as engine:
        for number, (x, y) in enumerate(batches(3)):
            Storing.step = number
            expected = 0.0
            for part in zip(x.chunk(2), y.chunk(2), strict=True):
                value = loss(plain, [t.to(device) for t in part]) / 2
                value.backward()
                expected += value.item()
            theirs.step()
            theirs.zero_grad()
            assert engine.step((x, y), 2).item() == pytest.approx(expected, rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value.cpu(), atol=1e-5, rtol=1e-4, msg=key)


class Detaching(Block):
    """Stores and returns tensors without a graph, and keeps one in a dict that other blocks read."""

    def forward(self, x):
        y = super().forward(x)
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.linspace(0, 1, len(x), device=x.device)[:, None]
        self.auxiliary = y.detach().mean()
        return y + self.cache[len(x)], y.detach().std()


class Constant(nn.Module):
    """Has weights, and returns only a tensor without a graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).detach()


class ReadsConstants(Model):
    block = Detaching

    def prepare(self):
        self.constants = nn.ModuleList(Constant() for _ in range(2))
        self.cache = {}
        for block in self.blocks:
            block.cache = self.cache

    def forward(self, x):
        for constant in self.constants:
            added = constant(x)
            assert not added.requires_grad
            x = x + added
        for block in self.blocks:
            x, deviation = block(x)
            x = x / (1 + float(deviation.cpu().numpy()))  # which torch refuses if it requires a gradient
        return self.head(x)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_has_no_graph_in_a_unit_has_none_outside(micro_batches, device):
    assert_equal_to_plain(ReadsConstants, loss, None, micro_batches, device)
    model = made(ReadsConstants, None)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine:
        for samples in (24, 24, 12):  # in the last step, the cache has entries from earlier ones
            x, y = next(batches(1, samples))
            engine.step((x, y), micro_batches)
            assert not any(tensor.requires_grad for tensor in model.cache.values())
            copy.deepcopy(model)  # which torch refuses for tensors with a graph
