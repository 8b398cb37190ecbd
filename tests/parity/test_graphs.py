"""Batches whose tensors have different first dimensions, such as graphs: they are not cut, and train as they are."""

import pytest
import torch
from torch import nn

from ferryman.engine import Engine
from support.models import Block, Result, assert_same, gradients, on

WIDTH = 32


class GraphNet(nn.Module):
    """Each node adds what its neighbors have."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes, edges):
        for block in self.blocks:
            passed = torch.zeros_like(nodes).index_add(0, edges[:, 1], nodes[edges[:, 0]])
            nodes = block(nodes + 0.1 * passed)
        return self.head(nodes.mean(0))


def graph_loss(model, graph):
    return (model(graph["nodes"], graph["edges"]) - graph["target"]).square().mean()


def graph(nodes, edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "nodes": torch.randn(nodes, WIDTH, generator=generator),
        "edges": torch.randint(0, nodes, (edges, 2), generator=generator),
        "target": torch.randn(1, generator=generator),
    }


def net():
    torch.manual_seed(0)
    return GraphNet().eval()  # no dropout


def accumulated(model, device, graphs):
    """Plain accumulation: the mean over graphs, each of which weighs the same."""
    plain = on(device, model)
    total = torch.zeros((), device=device)
    for one in graphs:
        loss = graph_loss(plain, {name: value.to(device) for name, value in one.items()}) * (1 / len(graphs))
        loss.backward()
        total += loss.detach()
    return Result(total.cpu(), gradients(plain))


@pytest.mark.parametrize("micro_batches", [None, 1])
def test_a_batch_that_is_not_cut_may_have_any_shape(device, micro_batches):
    model, batch = net(), graph(12, 40)
    with Engine(model, device=device, loss=graph_loss) as engine:
        loss = engine.forward_backward(batch, micro_batches).cpu()
        assert_same(Result(loss, gradients(model)), accumulated(model, device, [batch]))


def test_ready_micro_batches_weigh_the_same_where_samples_cannot_be_counted(device):
    model, graphs = net(), [graph(12, 40), graph(5, 9, seed=1), graph(20, 3, seed=2)]
    with Engine(model, device=device, loss=graph_loss) as engine:
        loss = engine.forward_backward(graphs).cpu()
        assert_same(Result(loss, gradients(model)), accumulated(model, device, graphs))


def test_it_is_refused_to_be_cut_with_the_ways_out():
    words = r"micro_batches=2: .*have 12, 40 and 1 samples.*list of ready-made micro-batches"
    with Engine(net(), device="cpu", loss=graph_loss) as engine, pytest.raises(ValueError, match=words):
        engine.forward_backward(graph(12, 40), micro_batches=2)


@pytest.mark.parametrize("as_list", [True, False])
def test_graphs_are_held_to_a_budget(as_list, virtual):
    budget = 2 << 20
    model, graphs = net(), [graph(300, 1000), graph(50, 90, seed=1), graph(200, 300, seed=2), graph(9, 9, seed=3)]
    batch = graphs if as_list else graphs[0]
    with Engine(model, device=virtual, loss=graph_loss, memory=budget) as engine:
        loss = engine.forward_backward(batch).cpu()
        first = Result(loss, gradients(model))
        others = torch.accelerator.memory_allocated(virtual) - engine.plan.fixed
        torch.accelerator.reset_peak_memory_stats(virtual)
        before = engine.fetches
        engine.forward_backward(batch)
        assert torch.accelerator.max_memory_allocated(virtual) - others <= budget
        usual = engine.fetches - before
        engine.forward_backward(graphs[1:])
        assert engine.fetches - before == 2 * usual, "smaller ones need no trial"
        with pytest.raises(ValueError, match=r"micro-batches of .* need .*memory=2\.00MiB; pass smaller micro-batches"):
            engine.forward_backward([graph(20_000, 1000), graphs[1]])
        engine.forward_backward(graphs[1:])
    assert_same(first, accumulated(net(), virtual, graphs if as_list else graphs[:1]))


def test_a_list_of_graphs_has_its_stash_where_there_is_room(virtual):
    graphs = [graph(300, 1000, seed) for seed in range(8)]
    for budget, on_host in (("2MiB", True), ("64MiB", False)):
        with Engine(net(), device=virtual, loss=graph_loss, memory=budget) as engine:
            engine.forward_backward(graphs)
            assert engine.choice[:2] == (8, on_host)
