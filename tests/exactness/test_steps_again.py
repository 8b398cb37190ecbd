"""Steps that are undone and run again: they have the same result as if they had run once."""

import copy

import torch
from torch import nn

from ferryman.engine import Engine

WIDTH, SAMPLES = 16, 32


class Greedy(nn.Module):
    """Takes memory that depends on the values of its input, as experts and packed sequences do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scratch = torch.ones(len(x), int(x[:, 0, 0].max()), device=x.device)
        return x + torch.tanh(self.linear(x)) * scratch.mean()


class Counting(nn.Module):
    """Counts its calls from the second step on, when no trial sees it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.counts = 0, False

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return x + torch.tanh(self.linear(x))


def mean_square(model, x):
    return model(x).square().mean()


def batch_of(size, seed):
    batch = torch.randn(SAMPLES, 8, WIDTH, generator=torch.Generator().manual_seed(seed)) / 4
    batch[:, :, 0] = size
    return batch


def test_a_step_that_runs_out_of_memory_runs_again_in_smaller_parts(virtual):
    torch.manual_seed(0)
    model = nn.Sequential(*(Greedy() for _ in range(4)))
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    with Engine(model, optimizers[0], device=virtual, memory="512KiB", loss=mean_square, deferred=True) as engine:
        counts = []
        for seed, size in enumerate([2, 6000, 6000]):
            batch = batch_of(size, seed)
            engine.step(batch)
            counts.append(engine.choice.micro_batches)
            mean_square(plain, batch).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert counts[1] > counts[0]
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, its)


def test_a_step_that_runs_again_skips_the_same_blocks(device):
    model = nn.Sequential(*(Counting() for _ in range(3)))
    with Engine(model, device=device, loss=mean_square) as engine:
        engine.forward_backward(batch_of(1, 0), 2)
        engine.zero_grad()
        for block in model:
            block.counts = True
        engine.skip(1)
        engine.forward_backward(batch_of(1, 0), 2)
        assert engine.gradient("1.linear.weight") is None
    assert [block.calls for block in model] == [2, 0, 2]
