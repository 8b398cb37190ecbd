"""Tables that a model builds once and passes to its blocks: one micro-batch makes them, and all use them."""

import pytest
import torch
from torch import nn

from support.small_models import WIDTH, Model, assert_equal_to_plain, loss

TABLES = {}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table):
        return x + torch.tanh(self.linear(x)) * table


class Tabled(Model):
    block = Scaled
    table = None

    def look_up(self, device):
        if self.table is None:
            self.table = make_table(device)
        return self.table

    def forward(self, x):
        table = self.look_up(x.device)
        for block in self.blocks:
            x = block(x, table)
        return self.head(x)


class Global(Tabled):
    def look_up(self, device):
        if id(self) not in TABLES:
            TABLES[id(self)] = make_table(device)
        return TABLES[id(self)]


def make_table(device):
    return torch.sin(torch.arange(2 * WIDTH, device=device, dtype=torch.float32))[::2]


@pytest.mark.parametrize("make", [Tabled, Global], ids=lambda make: make.__name__)
def test_every_micro_batch_has_the_table(device, make):
    TABLES.clear()
    assert_equal_to_plain(make, loss, None, 3, device)  # on an accelerator with the stash on the host
