"""`ferryman verify --model`: a good model passes, and each kind of broken one shows in the row it belongs to."""

import json
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from ferryman.cli.main import app
from support.devices import chosen

GOOD = """
    import os, random
    import torch
    from torch import nn

    SEEN = []  # both runs of a parity check use it

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout, self.calls = nn.Linear(8, 8), nn.Dropout(0.2), 0
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x + self.noise(x) + self.dropout(torch.tanh(self.linear(x)))

        def noise(self, x):
            return 0.1 * random.random() if self.training else 0.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)

        def forward(self, x):
            self.first = x
            for block in self.blocks:
                x = block(x)
            return self.head(x + self.first)

    def loss(model, batch):
        x, y = batch
        if model.training:
            SEEN.append(len(SEEN))
        return (model(x).squeeze(-1) - y).square().mean() + 0.1 * len(SEEN)

    def make():
        return Net(), (torch.randn(6, 8), torch.randn(6)), loss
"""

OWN_DRAWS = """
    def noise(self, x):
        return int.from_bytes(os.urandom(2)) / 2**16

    Block.noise = noise
"""

ACROSS_THE_BATCH = """
    def loss(model, batch):
        scores = model(batch[0])
        return (scores - scores.mean() - 1).square().mean() * scores.square().mean()

    def make():
        return Net(), (torch.randn(6, 8), torch.randn(6)), loss
"""

QUEUE = """
    class Queue(Net):
        def __init__(self):
            super().__init__()
            self.earlier = []

        def forward(self, x):
            x = x + sum(self.earlier)  # of micro-batches that have not come so far, when they take turns
            for block in self.blocks:
                x = block(x)
            self.earlier = [*self.earlier[-2:], x.detach().mean()]
            return self.head(x)

    def make():
        return Queue(), (torch.randn(6, 8), torch.randn(6)), loss
"""


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Runs the command in a directory that has the module `mine`, with this source."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*source, device="cpu", place="mine:make"):
        (tmp_path / "mine.py").write_text("".join(map(textwrap.dedent, source)))
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        return CliRunner().invoke(app, ["verify", "--device", device, "--model", place, "--json"])

    yield run
    sys.modules.pop("mine", None)


def results_of(ran):
    rows = json.loads(ran.stdout)["checks"]
    assert {row["group"] for row in rows} == {"model"}
    return {row["check"]: row for row in rows}


@pytest.mark.parametrize("device", chosen())
def test_a_good_model_passes_and_its_variables_are_named(verify, device):
    ran = verify(GOOD, device=device)
    assert ran.exit_code == 0, ran.output
    rows = results_of(ran)
    assert {name: row["result"] for name, row in rows.items()} == dict.fromkeys(
        ["second runs", "taking turns", "cutting", "parity"], "ok"
    )
    figures = rows["taking turns"]["figures"]
    assert figures["micro-batches"] == 3  # six samples make no four of equal size
    assert "model.first" in figures["private"]
    assert "model.blocks.0.calls" in figures["shared"]
    assert "random" in figures["seeded"]
    assert "blocks.0.mean" in figures["buffers of units"]
    assert rows["parity"]["figures"]["gradients"] == "bitwise"


@pytest.mark.parametrize(
    ("source", "row", "said", "skipped"),
    [
        (OWN_DRAWS, "second runs", "the unit 'blocks.2' gives other outputs", {"taking turns", "cutting", "parity"}),
        (ACROSS_THE_BATCH, "cutting", "the loss of samples 0 and 1 together", set()),
        (QUEUE, "taking turns", "model.earlier", set()),
    ],
)
@pytest.mark.filterwarnings("ignore:micro-batches give other results")
def test_what_is_broken_shows_in_its_row(verify, source, row, said, skipped):
    ran = verify(GOOD, source)
    assert ran.exit_code == 1, ran.output
    rows = results_of(ran)
    assert {name for name, found in rows.items() if found["result"] == "FAILED"} == {row}
    assert said in rows[row]["reason"]
    assert {name for name, found in rows.items() if found["result"] == "skipped"} == skipped


def test_what_is_wrong_without_a_check_shows_in_parity(verify, monkeypatch):
    """A clipping that the reference does not make, as any difference in the mathematics."""
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: None)
    rows = results_of(verify(GOOD, "def make():\n    return Net(), (torch.randn(6, 8), 100 * torch.ones(6)), loss\n"))
    assert rows["parity"]["result"] == "FAILED"
    assert "weights off by" in rows["parity"]["reason"]


def test_a_refusal_at_construction_is_said_once(verify):
    ran = verify(GOOD, "def make():\n    return nn.Linear(8, 1), (torch.randn(6, 8), torch.randn(6)), loss\n")
    assert ran.exit_code == 1
    rows = results_of(ran)
    assert "no repeated blocks" in rows["second runs"]["reason"]
    assert [row["result"] for row in rows.values()] == ["FAILED", "skipped", "skipped", "skipped"]


def test_a_batch_may_be_a_single_tensor(verify):
    alone = "def make():\n    return Net(), torch.randn(6, 8), lambda model, x: model(x).square().mean()\n"
    ran = verify(GOOD, alone)
    assert ran.exit_code == 0, ran.output
    assert {row["result"] for row in results_of(ran).values()} == {"ok"}


def test_one_sample_takes_turns_with_nobody(verify):
    ran = verify(GOOD, "def make():\n    return Net(), (torch.randn(1, 8), torch.randn(1)), loss\n")
    assert ran.exit_code == 0, ran.output
    assert [row["result"] for row in results_of(ran).values()] == ["ok", "skipped", "skipped", "ok"]


@pytest.mark.parametrize(
    ("source", "place", "said"),
    [
        ("make = 1", "mine", "such as my_module:make"),
        ("make = 1", "nobody:make", "'nobody' cannot be imported"),
        ("raise KeyError('data')", "mine:make", "KeyError: 'data'"),
        ("def maker(): pass", "mine:make", "did you mean 'maker'"),
        ("make = 1", "mine:make", "type int, not a function"),
        ("def make(): return 1", "mine:make", "returned a int"),
        ("def make(): return 1, 2, 3, 4", "mine:make", "returned a tuple of 4"),
        ("def make(): return 1, {}", "mine:make", "its model is a int"),
        ("import torch\ndef make(): return torch.nn.Linear(1, 1), 5", "mine:make", "its batch is a int"),
        ("import torch\ndef make(): return torch.nn.Linear(1, 1), {}, torch.nn.MSELoss()", "mine:make", "is a MSELoss"),
    ],
)
def test_mistakes_of_the_command_line_are_refused(verify, source, place, said):
    ran = verify(source, place=place)
    assert isinstance(ran.exception, ValueError)  # which `main` prints, and ends with 2
    assert said in str(ran.exception)
