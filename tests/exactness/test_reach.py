"""Tensors that leave a unit by ways that no attribute shows, state that no walk from the model finds, and weights that
are edited in a forward: equal to plain PyTorch, or refused by name."""

import array
import contextvars
import dataclasses
import gc
import itertools
import queue
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from ferryman.engine import Engine
from support.devices import torch_virtual
from support.models import text
from support.slow import slow
from support.small_models import WIDTH, Block, Model, assert_equal_to_plain, batches, loss, made, train

COLLECTED = contextvars.ContextVar("collected")
LOCAL = threading.local()
WEAK = weakref.WeakKeyDictionary()
QUEUE = queue.SimpleQueue()


@pytest.fixture(autouse=True)
def nothing_kept():
    """Tensors of the device, that is."""
    yield
    COLLECTED.set(None)
    WEAK.clear()


def with_local_hook(position):
    """The loss captures an activation from inside a block, in a list that nobody else knows."""

    def function(model, batch):
        features = []
        handle = model.blocks[position].linear.register_forward_hook(lambda *found: features.append(found[2]))
        try:
            value = loss(model, batch)
        finally:
            handle.remove()
        return value + features[0].pow(2).mean()

    return function


def collected(model, batch):
    """As transformers collects attentions and router logits."""
    found = []
    token = COLLECTED.set(found)
    try:
        value = loss(model, batch)
    finally:
        COLLECTED.reset(token)
    return value + sum(found)


class Collecting(Model):
    class block(Block):  # noqa: N801 - as the model names it
        def forward(self, x):
            x = super().forward(x)
            COLLECTED.get().append(x.pow(2).mean())
            return x


class SettingContext(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            x = super().forward(x)
            COLLECTED.set(x.pow(2).mean())
            return x


def of_context(model, batch):
    return loss(model, batch) + COLLECTED.get()


class Weakly(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            x = super().forward(x)
            WEAK[self] = x.pow(2).mean()
            return x


def of_weak(model, batch):
    return loss(model, batch) + sum(WEAK[block] for block in model.blocks)


class Slotted:
    """A loss with a state of its own, in slots."""

    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0

    def __call__(self, model, batch):
        value = loss(model, batch) * self.factor
        self.factor *= 1.1
        return value


def counting_in(counts):
    def function(model, batch):
        counts[0] += 1
        return loss(model, batch)

    return function


def scaled_by(get, put):
    """State that lives on from step to step."""

    def function(model, batch):
        factor = get()
        put(factor * 1.1)
        return loss(model, batch) * factor

    return function


def context_scale():
    variable = contextvars.ContextVar("scale", default=1.0)
    return scaled_by(variable.get, variable.set)


def local_scale():
    held = threading.local()
    held.factor = 1.0
    return scaled_by(lambda: held.factor, lambda value: setattr(held, "factor", value))


def array_scale():
    factors = np.ones(3)
    return scaled_by(lambda: float(factors[1]), lambda value: factors.__setitem__(1, value))


def large_dict_scale():
    factors = dict.fromkeys(range(5000), 1.0)
    return scaled_by(lambda: factors[3], lambda value: factors.__setitem__(3, value))


EQUAL = {
    "a local hook in the first block": lambda: (Model, with_local_hook(0)),
    "a local hook in the last block": lambda: (Model, with_local_hook(-1)),
    "a collector in a context variable": lambda: (Collecting, collected),
    "a context variable set by a unit": lambda: (SettingContext, of_context),
    "a weak dictionary": lambda: (Weakly, of_weak),
    "a queue with a lock": lambda: (Model, queued()),
}
ONE_AFTER_THE_OTHER = {  # with several micro-batches each needs what the last one has left
    "slots": lambda: (Model, Slotted()),
    "a context variable": lambda: (Model, context_scale()),
    "a thread-local variable": lambda: (Model, local_scale()),
    "an array": lambda: (Model, array_scale()),
    "a large dict": lambda: (Model, large_dict_scale()),
}


def queued():
    waiting = queue.Queue()

    def function(model, batch):
        waiting.put(loss(model, batch))
        return waiting.get()

    return function


class TwoMakes:
    """`assert_equal_to_plain` runs a function twice; each run has a state of its own."""

    def __init__(self, case):
        self._functions = [case()[1], case()[1]]

    def __call__(self, model, batch):
        if not hasattr(model, "function"):
            model.function = self._functions.pop()
        return model.function(model, batch)


@pytest.mark.parametrize("micro_batches", [3, *slow(1)])
@pytest.mark.parametrize("name", EQUAL)
def test_what_leaves_a_unit_has_its_gradient(name, micro_batches, device):
    make, function = EQUAL[name]()
    assert_equal_to_plain(make, function, None, micro_batches, device)


@pytest.mark.parametrize("name", ONE_AFTER_THE_OTHER)
def test_state_lives_on_from_step_to_step(name, device):
    make, _ = ONE_AFTER_THE_OTHER[name]()
    assert_equal_to_plain(make, TwoMakes(ONE_AFTER_THE_OTHER[name]), None, 1, device)


@pytest.mark.parametrize(
    "make", [lambda: np.zeros(2, np.int64), lambda: array.array("q", [0, 0]), lambda: bytearray(2)]
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_trials_are_not_counted(make, micro_batches, device):
    counts = make()
    train(made(Model, None), counting_in(counts), device, micro_batches, steps=2)
    assert counts[0] == 2 * micro_batches


class CountingBlocks(Model):
    class block(Block):  # noqa: N801
        counts = np.zeros(1)

        def forward(self, x):
            self.counts[0] += 1
            return super().forward(x)


def test_an_array_that_units_edit_is_edited_once_per_call(device):
    CountingBlocks.block.counts[:] = 0
    train(made(CountingBlocks, None), loss, device, 3, steps=2)
    assert CountingBlocks.block.counts[0] == 2 * 3 * 4


MIXTRAL = hf.MixtralConfig(
    num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=64, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0,
)  # fmt: skip
LLAMA = hf.LlamaConfig(
    num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=64, attn_implementation="eager",
)  # fmt: skip


def of_attentions(model, batch):
    output = model(**batch, output_attentions=True)
    return output.loss + 10 * sum(layer.pow(2).sum(-1).mean() for layer in output.attentions)


def of_hidden_states(model, batch):
    output = model(**batch, output_hidden_states=True)
    return output.loss + sum(layer.pow(2).mean() for layer in output.hidden_states)


@pytest.mark.parametrize("micro_batches", [2, *slow(1)])
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: hf.MixtralForCausalLM(MIXTRAL), lambda model, batch: model(**batch).loss),
        (lambda: hf.LlamaForCausalLM(LLAMA), of_attentions),
        (lambda: hf.LlamaForCausalLM(LLAMA), of_hidden_states),
    ],
    ids=["router logits", "attentions", "hidden states"],
)
def test_what_transformers_collects_has_its_gradient(make, function, micro_batches, device):
    torch.manual_seed(0)
    model = make().train()
    torch.manual_seed(0)
    plain = make().train().to(device)
    batch = {name: ids % 64 for name, ids in text(4).items()}
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), device=device, loss=function) as engine:
        for _ in range(2):
            found = engine.step(batch, micro_batches).item()
            expected = 0.0
            for number in range(micro_batches):
                part = {name: ids.chunk(micro_batches)[number].to(device) for name, ids in batch.items()}
                value = function(plain, part) / micro_batches
                value.backward()
                expected += value.item()
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
            assert found == pytest.approx(expected, rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter.cpu(), atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.exact
def test_what_was_collected_does_not_outlive_the_engine(virtual):
    def train_and_close():
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(LLAMA)
        batch = {name: ids % 64 for name, ids in text(4).items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Engine(model, optimizer, device=virtual, loss=of_attentions) as engine:
            engine.step(batch, 2)

    taken = []
    for _ in range(2):
        train_and_close()
        gc.collect()
        taken.append(torch_virtual.memory_allocated(virtual))
    assert taken[1] <= taken[0]


class Meter:
    def __init__(self):
        self.count = 0

    def update(self):
        self.count += 1


METERS = {}
KEPT = contextvars.ContextVar("kept")


class Metered(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            METERS.setdefault("calls", Meter()).update()
            KEPT.get()[0].update()
            KEPT.get()[1].append(1)
            return super().forward(x)


def test_meters_count_each_call_once(device):
    METERS.clear()
    model = made(Metered, None)
    with Engine(model, torch.optim.AdamW(model.parameters()), device=device, loss=loss) as engine:
        for number in (1, 2):
            KEPT.set((Meter(), []))
            engine.step(next(batches(1)), 3)
            assert METERS["calls"].count == number * 3 * 4
            assert KEPT.get()[0].count == len(KEPT.get()[1]) == 3 * 4
    KEPT.set(None)


class Client:
    """Sends what it is given in a thread of its own, as clients of logging services do."""

    def __init__(self):
        self.waiting, self.sent = queue.Queue(), 0
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self):
        while True:
            self.waiting.get()
            self.sent += 1
            self.waiting.task_done()

    def hook(self, *_):
        self.send()

    def send(self):
        self.waiting.put(1)
        self.waiting.join()  # `sent` changes at a time that does not depend on how threads are scheduled


@pytest.mark.parametrize("by", ["hook", "loss"])
def test_other_threads_are_left_alone(by, device):
    client, model = Client(), made(Model, None)

    def function(model, batch):
        client.send()
        return loss(model, batch)

    if by == "hook":
        model.blocks[1].linear.register_forward_hook(client.hook)
    train(model, function if by == "loss" else loss, device, 3, steps=2)
    client.waiting.join()  # it would hang if a snapshot had put the queue back


@dataclasses.dataclass(slots=True, weakref_slot=True)
class Slots:
    seen: int = 0


class Oddities:
    """What a loss may refer to, and no snapshot may stumble over."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.table = np.arange(4)
        self.table.flags.writeable = False
        self.slots = Slots()
        self.seconds = 0.0

    def __call__(self, model, batch):
        began = time.perf_counter()
        self.slots.seen += 1
        value = loss(model, batch)
        self.seconds += time.perf_counter() - began
        return value

    def hook(self, *_):
        self.slots.seen += 0


def test_ordinary_objects_are_not_in_the_way(device):
    model = made(Model, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    function = Oddities(optimizer)
    model.blocks[1].linear.register_forward_hook(function.hook)
    with Engine(model, optimizer, device=device, loss=function) as engine:
        for batch in batches(2):
            engine.step(batch, 3)
    assert function.slots.seen == 6
    assert function.seconds > 0


# Refused.


class Queueing(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            x = super().forward(x)
            QUEUE.put(x.pow(2).mean())
            return x


class QueueingInputs(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            QUEUE.put(x.pow(2).mean())
            return super().forward(x)


def of_queue(model, batch):
    return loss(model, batch) + sum(QUEUE.get() for _ in model.blocks)


class Renormalized(Model):
    def prepare(self):
        self.embed = nn.Embedding(5, WIDTH, max_norm=0.5)
        nn.init.normal_(self.embed.weight, std=3.0)

    def forward(self, x):
        return super().forward(x + self.embed(x.argmax(1) % 5))


class Decaying(Model):
    class block(Block):  # noqa: N801
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.99)
            return super().forward(x)


class Teacher(Model):
    """Averages itself into a copy, past what autograd sees."""

    def prepare(self):
        self.teacher = nn.Linear(WIDTH, 5).requires_grad_(False)

    def forward(self, x):
        self.teacher.weight.data.mul_(0.9)
        return super().forward(x) + self.teacher(x)


class Drawing:
    """From a stream that cannot be read twice."""

    def __init__(self):
        self.stream = iter(float(number) for number in itertools.count(1))

    def __call__(self, model, batch):
        return loss(model, batch) * next(self.stream)


REFUSED = {
    "a tensor in a queue": (Queueing, lambda: of_queue, {}, r"from inside the unit 'blocks\.\d'.*Return it from"),
    "of inputs": (QueueingInputs, lambda: of_queue, {}, r"from inside the unit 'blocks\.\d'.*Return it from"),
    "max_norm": (Renormalized, lambda: loss, {}, r"'embed\.weight' is edited in place.*max_norm"),
    "a decay in a block": (Decaying, lambda: loss, {}, r"'blocks\.0\.linear\.weight' is edited in place"),
    "a teacher through .data": (
        Teacher, lambda: loss, {"resident": ["teacher.*"]}, r"'teacher\.weight' is edited in place",
    ),
    "a stream": (Model, Drawing, {}, r"the loss of micro-batch 0 is .* cannot restore, such as an iterator"),
}  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, *slow(3)])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_in_every_step(name, micro_batches, device):
    make, function, options, expected = REFUSED[name]
    if micro_batches == 3 and name == "a stream":
        expected = r"two runs of the same micro-batches.* cannot restore, such as an iterator"
    model = made(make, None)
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = next(batches(1))
    with Engine(model, optimizer, device=device, loss=function(), **options) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match=expected):
                engine.step(batch, micro_batches)
            while not QUEUE.empty():
                QUEUE.get()
    if "edited" not in expected:
        for name, before in trained.items():
            torch.testing.assert_close(model.get_parameter(name).detach(), before, rtol=0, atol=0)
