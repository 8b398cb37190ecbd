"""Units that store tensors with their graph, while graphs of calls are kept until their backward."""

import pytest
import torch

from ferryman import Engine
from support.small_models import Block, Model, batches, loss, made


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
