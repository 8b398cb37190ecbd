"""State that user code changes in the backward of a unit: kept as in plain PyTorch, or refused."""

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.slow import covering, cpu_is_slow
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made


class TensorHook(Model):
    """Divides gradients by a running average of their norm."""

    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.residual = 1.0

        def forward(self, x):
            y = self.linear(x)
            if y.requires_grad:
                y.register_hook(self.normalize)
            return x + torch.tanh(y)

        def normalize(self, gradient):
            self.residual = 0.5 * self.residual + 0.5 * float(gradient.norm())
            return gradient / self.residual


class AverageInBuffer(Model):
    class block(TensorHook.block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.ones(()))

        def normalize(self, gradient):
            self.average.mul_(0.5).add_(gradient.norm(), alpha=0.5)
            return gradient / self.average


class AssignedInBackward(Model):
    class block(AverageInBuffer.block):  # noqa: N801
        def normalize(self, gradient):
            self.average = 0.5 * self.average + 0.5 * gradient.norm()
            return gradient / self.average


class EditedInBoth(Model):
    """The forward counts in one buffer, which the graph needs, and the backward in another."""

    class block(AverageInBuffer.block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return super().forward(x * (1 + 0.1 * self.count))


class AverageInTensor(Model):
    """A tensor that is neither a parameter nor a buffer."""

    class block(AverageInBuffer.block):  # noqa: N801
        def __init__(self):
            super().__init__()
            del self.average
            self.average = None

        def normalize(self, gradient):
            if self.average is None:
                self.average = torch.ones((), device=gradient.device)
            self.average.mul_(0.5).add_(gradient.norm(), alpha=0.5)
            return gradient / self.average


class ModuleHook(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.residual = 1.0
            self.linear.register_full_backward_hook(self.normalize)

        def normalize(self, module, gradients, output_gradients):
            self.residual = 0.9 * self.residual + 0.1 * float(output_gradients[0].norm())
            return None if gradients[0] is None else (gradients[0] / self.residual,)


class Quantize(torch.autograd.Function):
    """Delayed scaling: the backward keeps a history of maxima, which scales the gradients that follow."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x

    @staticmethod
    def backward(ctx, gradient):
        ctx.module.log.append(gradient.abs().max().item())
        scale = max(ctx.module.log[-4:]) / 7
        return (gradient / scale).round() * scale, None


class DelayedScaling(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.log = [1e-3]

        def forward(self, x):
            return x + torch.tanh(Quantize.apply(self.linear(x), self))


class Collected(Model):
    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.log = []

        def forward(self, x):
            y = self.linear(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: self.log.append(gradient.norm().item()))
            return x + torch.tanh(y)


class OneForAllBlocks(Model):
    """The blocks have one average in common, so that the order of all backwards matters."""

    class block(TensorHook.block):  # noqa: N801
        def normalize(self, gradient):
            self.common[0] = 0.5 * self.common[0] + 0.5 * float(gradient.norm())
            return gradient / self.common[0]

    def prepare(self):
        self.common = [1.0]
        for block in self.blocks:
            block.common = self.common


EQUAL = [
    TensorHook,
    AverageInBuffer,
    AssignedInBackward,
    EditedInBoth,
    AverageInTensor,
    ModuleHook,
    DelayedScaling,
    Collected,
]


@covering
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("device", cpu_is_slow(), indirect=True)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("make", EQUAL)
def test_what_a_backward_changes_is_kept(make, micro_batches, device):
    assert_equal_to_plain(make, loss, None, micro_batches, device)


def test_one_micro_batch_may_have_state_for_all_blocks(device):
    assert_equal_to_plain(OneForAllBlocks, loss, None, 1, device)


class ReadInForward(Model):
    """A forward that sees what the backward of the micro-batch before it has left."""

    class block(AverageInBuffer.block):  # noqa: N801
        def forward(self, x):
            return super().forward(x / (1 + self.average))


@pytest.mark.parametrize("make", [OneForAllBlocks, ReadInForward])
def test_an_order_of_backwards_that_matters_is_kept(make, device):
    with pytest.warns(UserWarning, match="micro-batches run one after the other"):
        assert_equal_to_plain(make, loss, None, 4, device)


class OwnBuffer(nn.Module):
    """Keeps a reference to its buffer from the forward for the backward, and edits it in both."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(()))

    def forward(self, x):
        average = self.average
        average.mul_(0.9)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: average.add_(gradient.norm()) and None)
        return x + torch.tanh(y)


class CapturedBuffer(Model):
    block = OwnBuffer


def test_a_reference_to_a_buffer_that_both_edit_is_refused(device):
    model = made(CapturedBuffer, None)
    with (
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=loss) as engine,
        pytest.raises(ValueError, match=r"edits its buffer 'blocks.3.average' in its forward, and in its backward"),
    ):
        engine.step(next(batches(1)), 1)
    assert [block.average.item() for block in model.blocks] == [1.0] * 4
