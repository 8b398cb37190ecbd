"""With the stash on the host: tensors that are edited in place between units have the edits when they come back."""

import pytest
import torch

from ferryman.engine import Engine
from support.slow import covering
from support.small_models import Block, Model, assert_equal_to_plain, batches, loss


class Accumulates(Model):
    """Adds up what its blocks return, in place."""

    def forward(self, x):
        total, rows = torch.zeros_like(x), torch.arange(len(x), device=x.device)
        for number, block in enumerate(self.blocks):
            self.add(total, block(x), rows, number)
        return self.head(total)


class ByIndex(Accumulates):
    def add(self, total, part, rows, number):
        total.index_add_(0, rows, part)


class BySlices(Accumulates):
    def add(self, total, part, rows, number):
        total[number % 2 :: 2] += part[number % 2 :: 2]


class ThroughData(Accumulates):
    """Edits that no version counter shows; they are constants to autograd, as in plain PyTorch."""

    def add(self, total, part, rows, number):
        total.data.add_(part.detach())


class ThroughAView(Accumulates):
    def add(self, total, part, rows, number):
        flat = total.detach().as_strided((total.numel() // 2,), (2,))
        flat.add_(part.detach().reshape(-1)[::2])


class ByForeach(Accumulates):
    def add(self, total, part, rows, number):
        with torch.no_grad():
            torch._foreach_add_([total], [part])


class ByOut(Accumulates):
    """Makes the tensor larger that the result is written to."""

    def forward(self, x):
        result = x.new_empty(16)
        with torch.no_grad():
            for block in self.blocks:
                y = block(x)
                torch.add(x, y, out=result.resize_(x.shape))
        return self.head(self.blocks[0](x) + result)


class Experts(Model):
    """Each sample goes to one of the blocks."""

    def forward(self, x):
        chosen, result = x[:, : len(self.blocks)].argmax(1), torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            rows = (chosen == number).nonzero()[:, 0]
            result.index_add_(0, rows, block(x[rows]))
        return self.head(x + result)


class InUnitsWithoutGradients(Model):
    """A teacher's pass: blocks write to a tensor that they are given."""

    class block(Block):  # noqa: N801
        def forward(self, x, result=None):
            y = super().forward(x)
            if result is not None:
                result += y
            return y

    def forward(self, x):
        result = torch.zeros_like(x)
        with torch.no_grad():
            for block in self.blocks:
                block(x, result)
        return super().forward(x + result)


class InferenceMode(Model):
    """As above, with tensors that have no version counter."""

    block = InUnitsWithoutGradients.block

    def forward(self, x):
        with torch.inference_mode():
            result = torch.zeros_like(x)
            for block in self.blocks:
                block(x, result)
                result *= 0.5
        return super().forward(x) * (1 + result.clone().mean())


@covering
@pytest.mark.parametrize(
    "make",
    [ByIndex, BySlices, ThroughData, ThroughAView, ByForeach, ByOut, Experts, InUnitsWithoutGradients, InferenceMode],
)
def test_edits_are_there_when_a_micro_batch_goes_on(make, device):
    for micro_batches in (1, 2):
        assert_equal_to_plain(make, loss, None, micro_batches, device)


class ThroughDataInAUnit(Model):
    """The version of the tensor does not change, and within units no operator is watched."""

    class block(Block):  # noqa: N801
        def forward(self, x, result):
            y = super().forward(x)
            result.data.add_(y)
            return y

    def forward(self, x):
        result = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, result)
        return self.head(x + result)


def test_an_edit_that_cannot_be_seen_is_refused_before_a_weight_changes(virtual):
    model = ThroughDataInAUnit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=virtual, loss=loss, stash="host") as engine:
        with pytest.raises(ValueError, match=r"is edited in a way that the engine cannot see.*stash='device'"):
            engine.step(next(batches(1)), 2)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
