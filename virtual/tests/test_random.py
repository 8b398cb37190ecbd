"""The device's random numbers are its own, reproducible, and the CPU's for equal seeds."""

from __future__ import annotations

import threading

import pytest
import torch
import torch_virtual
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

DRAWS = {
    "rand": lambda d: torch.rand(50, device=d),
    "randn": lambda d: torch.randn(50, device=d),
    "randint": lambda d: torch.randint(100, (50,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(50, device=d)),
    "normal_": lambda d: torch.zeros(50, device=d).normal_(1, 2),
    "uniform_": lambda d: torch.zeros(50, device=d).uniform_(-1, 1),
    "bernoulli": lambda d: torch.bernoulli(torch.full((50,), 0.3, device=d)),
    "exponential_": lambda d: torch.zeros(50, device=d).exponential_(),
    "multinomial": lambda d: torch.multinomial(torch.full((20,), 0.05, device=d), 9),
    "poisson": lambda d: torch.poisson(torch.full((50,), 3.0, device=d)),
    "normal": lambda d: torch.normal(torch.zeros(50, device=d), 1.0),
    "trunc_normal_": lambda d: torch.nn.init.trunc_normal_(torch.zeros(50, device=d)),
    "kaiming_uniform_": lambda d: torch.nn.init.kaiming_uniform_(torch.zeros(5, 10, device=d)),
    "dropout": lambda d: F.dropout(torch.ones(50, device=d), 0.5),
    "native_dropout": lambda d: torch.native_dropout(torch.ones(50, device=d), 0.5, True)[0],
    "dropout1d": lambda d: F.dropout1d(torch.ones(10, 5, 2, device=d), 0.5),
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(50, device=d), 0.5, training=True),
    "rrelu": lambda d: F.rrelu(-torch.ones(50, device=d), training=True),
    "attention": lambda d: F.scaled_dot_product_attention(*(torch.ones(1, 2, 5, 4, device=d),) * 3, dropout_p=0.5),
    "gumbel_softmax": lambda d: F.gumbel_softmax(torch.ones(5, 10, device=d)),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_leaves_the_cpus_generator_alone_and_equals_the_cpus(same, name):
    draw = DRAWS[name]
    torch.manual_seed(17)
    cpu_state = torch.get_rng_state()
    device_state = torch_virtual.get_rng_state()
    first, second = draw("virtual"), draw("virtual")
    assert torch.equal(torch.get_rng_state(), cpu_state)
    assert not torch.equal(torch_virtual.get_rng_state(), device_state)
    assert not torch.equal(first.cpu(), second.cpu())
    device_state = torch_virtual.get_rng_state()
    same([first, second], [draw("cpu"), draw("cpu")])
    assert torch.equal(torch_virtual.get_rng_state(), device_state)  # nor does the CPU's draw touch the device's


def test_manual_seed_seeds_all_devices():
    torch.manual_seed(5)
    draws = [torch.rand(9, device=d).cpu() for d in ("cpu", "virtual:0", "virtual:1", "virtual:3")]
    assert all(torch.equal(d, draws[0]) for d in draws)
    torch_virtual.manual_seed_all(6)
    assert torch.equal(torch.rand(9, device="virtual:0").cpu(), torch.rand(9, device="virtual:2").cpu())
    with torch_virtual.device(1):
        torch_virtual.manual_seed(7)
        assert torch_virtual.initial_seed() == 7
    assert torch_virtual.initial_seed() == 6
    assert torch.initial_seed() == 5
    assert torch_virtual.seed() != torch_virtual.seed()


def test_devices_draw_apart():
    torch.manual_seed(5)
    a = torch.rand(9, device="virtual:0").cpu()
    torch.rand(100, device="virtual:1")
    b = torch.rand(9, device="virtual:0").cpu()
    torch.manual_seed(5)
    assert torch.equal(torch.rand(18, device="virtual:0").cpu(), torch.cat([a, b]))


def test_a_state_can_be_taken_and_put_back(same):
    state, states = torch_virtual.get_rng_state(), torch_virtual.get_rng_state_all()
    assert state.device.type == "cpu"
    first = [torch.randn(7, device="virtual:0"), torch.randn(7, device="virtual:1")]
    torch_virtual.set_rng_state(state)
    same(torch.randn(7, device="virtual:0"), first[0])
    torch_virtual.set_rng_state_all(states)
    same([torch.randn(7, device="virtual:0"), torch.randn(7, device="virtual:1")], first)
    torch_virtual.set_rng_state(states[1], "virtual:1")
    same(torch.randn(7, device="virtual:1"), first[1])
    with pytest.raises((RuntimeError, TypeError)):
        torch_virtual.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_generators_are_those_of_the_devices(same):
    assert len(torch_virtual.default_generators) == torch_virtual.device_count()
    state = torch_virtual.default_generators[1].get_state()
    assert torch.equal(state, torch_virtual.get_rng_state("virtual:1"))
    first = torch.randn(7, device="virtual:1")
    torch_virtual.default_generators[1].set_state(state)
    same(torch.randn(7, device="virtual:1"), first)


def test_fork_rng_puts_the_state_back(same):
    with torch.random.fork_rng(devices=[0, 1], device_type="virtual"):
        inside = torch.rand(5, device="virtual")
        torch.rand(5, device="virtual:1")
    same(torch.rand(5, device="virtual"), inside)
    same(torch.rand(5, device="virtual:1"), inside)


def test_a_generator_of_ones_own(same):
    generator = torch.Generator(device="virtual").manual_seed(3)
    state = torch_virtual.get_rng_state()
    first = torch.randn(5, device="virtual", generator=generator)
    assert torch.equal(torch_virtual.get_rng_state(), state)
    same(first, torch.randn(5, generator=torch.Generator().manual_seed(3)))
    saved = generator.get_state()
    second = torch.randperm(5, device="virtual", generator=generator)
    generator.set_state(saved)
    same(torch.randperm(5, device="virtual", generator=generator), second)
    twin = generator.clone_state()
    same(
        torch.zeros(4, device="virtual").uniform_(generator=twin), torch.rand(4, device="virtual", generator=generator)
    )
    assert generator.device.type == "virtual"
    assert generator.initial_seed() == 3


def test_generators_are_for_their_device():
    for wrong in (torch.Generator(), torch.Generator(device="virtual:1")):
        with pytest.raises((RuntimeError, ValueError), match="generator"):
            torch.randn(5, device="virtual:0", generator=wrong)
    with pytest.raises(RuntimeError):
        torch.randn(5, generator=torch.Generator(device="virtual"))


def test_threads_share_a_generator_and_no_number_is_drawn_twice():
    draws: list[torch.Tensor] = []
    torch.manual_seed(1)

    def draw() -> None:
        for _ in range(50):
            draws.append(torch.rand(100, device="virtual", dtype=torch.float64).cpu())

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.manual_seed(1)
    expected = torch.rand(20_000, dtype=torch.float64).sort().values
    assert torch.equal(torch.cat(draws).sort().values, expected)
