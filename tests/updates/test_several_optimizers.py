"""Several optimizers in one engine, each with some of the parameters: Muon for matrices, and AdamW for the others."""

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.engine import Engine
from support.checkpoints import Run, assert_resumes
from support.models import CASES, Toy, build, cut, plain_step, text
from support.own_steps import ScheduleFree
from support.slow import covering
from support.updates import WAYS, assert_near


def muon_and_adamw(model):
    """As its users write it: embeddings and the head are not for Muon."""
    hidden = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    known = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01),
    ]


class Pair:
    """A model in an engine with two optimizers, and the same in plain PyTorch."""

    def __init__(self, make=muon_and_adamw, **options):
        self.model, self.plain = build(CASES["toy"]), build(CASES["toy"])
        self.optimizers, self.theirs = make(self.model), make(self.plain)
        self.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(one, 0.5 if place % 2 else 0.8)
            for place, one in enumerate((*self.optimizers, *self.theirs))
        ]
        self.norm, self.seed = options.get("max_grad_norm"), 0
        self.engine = Engine(self.model, self.optimizers, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def step(self, count=1):
        for _ in range(count):
            self.seed += 1
            torch.manual_seed(self.seed)
            self.engine.step(text(4, self.seed), 2)
            torch.manual_seed(self.seed)
            plain_step(self.plain, cut(text(4, self.seed), 2))
            if self.norm is not None:
                nn.utils.clip_grad_norm_(self.plain.parameters(), self.norm)
            for one in self.theirs:
                one.step()
                one.zero_grad()
            for schedule in self.schedules:
                schedule.step()

    def assert_same(self, limit):
        assert_near(self.model, self.plain, limit)
        for ours, theirs in zip(self.optimizers, self.theirs, strict=True):
            mine, expected = ours.state_dict(), theirs.state_dict()
            assert mine["param_groups"] == expected["param_groups"]
            assert mine["state"].keys() == expected["state"].keys()
            for key, state in expected["state"].items():
                for name, value in state.items():
                    torch.testing.assert_close(mine["state"][key][name], value, atol=1e-5, rtol=1e-3)


# Muon computes in bfloat16: where gradients differ in their last bits, by clipping, its updates differ in the third.
LIMITS = {"eager": 2e-6, "deferred": 2e-6, "clipped": 1e-3}


@covering
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_plain_pytorch(way, device):
    with Pair(device=device, **WAYS[way]) as pair:
        pair.step(3)
        pair.assert_same(LIMITS[way])
        pair.step(2)
    pair.assert_same(LIMITS[way])


@pytest.mark.parametrize("held", [True, False])
def test_the_device_updates_what_a_rule_updates(held, accelerator):
    """Units that Muon has no part in."""
    with Pair(device=accelerator, updates="stride:2", subgroup=256, held=held) as pair:
        pair.step(3)
        assert pair.engine.stats().device_share > 0
        pair.assert_same(1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_in_float32(precision, device):
    model = build(CASES["toy"])
    wide = copy.deepcopy(model)
    optimizers, theirs = muon_and_adamw(model), muon_and_adamw(wide)
    with Engine(model, optimizers, device=device, precision=precision) as engine:
        for seed in range(3):
            engine.forward_backward(text(4, seed), 2)
            for name, parameter in wide.named_parameters():
                parameter.grad = engine.gradient(name).clone()
            engine.update()
            for one in theirs:
                one.step()
    assert_near(model, wide, 1e-6)


def clear(one):
    one.state.clear()


def halve(one):
    for state in one.state.values():
        for name, value in state.items():
            if name != "step":
                value.mul_(0.5)


def load(one):
    one.load_state_dict(copy.deepcopy(one.state_dict()))


@covering
@pytest.mark.parametrize("change", [clear, halve, load])
@pytest.mark.parametrize("which", [0, 1])
def test_the_state_of_one_changes_and_that_of_the_other_stays(which, change, device):
    with Pair(device=device, deferred=True) as pair:
        pair.step(2)
        change(pair.optimizers[which])
        change(pair.theirs[which])
        pair.step(2)
        pair.assert_same(1e-5)


def test_what_is_refused(device):
    model = Toy()
    muon, adamw = muon_and_adamw(model)
    for optimizers, words in [
        ([], "the list of optimizers is empty"),
        ([muon], r"does not have 'embed.weight' and \d+ more.*takes several optimizers"),
        ([muon, adamw, "SGD"], "must be a torch.optim.Optimizer, or a list of several; this is a str"),
        ([muon, adamw, adamw], r"twice, of shape \(64, 16\), in its groups 0 of AdamW and 0 of AdamW"),
        ([muon, torch.optim.AdamW(model.parameters())], "in its groups 0 of Muon and 0 of AdamW"),
    ]:
        with pytest.raises(ValueError, match=words):
            Engine(model, optimizers, device=device)
    with pytest.raises(ValueError, match="state='8bit' is not possible with Muon"):
        Engine(model, [muon, adamw], device=device, state="8bit")
    with Engine(model, [muon, adamw], device=device) as engine:
        for one in (muon, adamw):
            with pytest.raises(ValueError, match=r"optimizer\.step\(\) was called"):
                one.step()
        engine.step(text(4), 2)
    for one in (muon, adamw):
        one.step()


def test_one_that_couples_tensors_is_refused_by_its_name(device):
    model = Toy()
    muon, adamw = muon_and_adamw(model)
    lbfgs = torch.optim.LBFGS(adamw.param_groups[0]["params"])
    with pytest.raises(ValueError, match="LBFGS cannot be used"):
        Engine(model, [muon, lbfgs], device=device)


@covering
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_they_resume(tmp_path, way, precision):
    options = {**WAYS[way], "precision": precision}
    assert_resumes(tmp_path, Run(optimizer=muon_and_adamw, options=options))


def test_a_checkpoint_of_others_is_refused(tmp_path):
    with Run(optimizer=muon_and_adamw) as run:
        run.step(0, 1)
        run.engine.save(tmp_path / "saved")
    with (
        Run(optimizer=lambda model: muon_and_adamw(model)[::-1]) as other,
        pytest.raises(ValueError, match="has the state of Muon, AdamW, but the engine's optimizer is AdamW, Muon"),
    ):
        other.engine.load(tmp_path / "saved")


def test_groups_are_added_to_the_first(device):
    """The groups of the second keep their tensors."""

    def make(model):
        muon, adamw = muon_and_adamw(model)
        return [muon, ScheduleFree(adamw.param_groups[0]["params"])]

    with Pair(make, device=device) as pair:
        pair.step(2)
        block = copy.deepcopy(pair.plain.blocks[0])
        blocks = block, copy.deepcopy(block)
        for one, (muon, rest) in zip(blocks, (pair.optimizers, pair.theirs), strict=True):
            muon.add_param_group({"params": [p for p in one.parameters() if p.dim() == 2], "lr": 1e-4})
            rest.add_param_group({"params": [p for p in one.parameters() if p.dim() != 2], "k": 5})
        for schedule in pair.schedules:
            schedule.base_lrs.append(1e-4)
        pair.engine.insert(1, block)
        pair.plain.blocks.insert(1, blocks[1])
        pair.step(2)
        assert [group["k"] for group in pair.optimizers[1].param_groups] == [4, 7]
        pair.assert_same(1e-5)


def test_host_account(device):
    model = build(CASES["toy"])
    optimizers = muon_and_adamw(model)
    with Engine(model, optimizers, device=device) as engine:
        predicted = engine.host_account["optimizer state"]
        engine.step(text(4), 2)
        muon = sum(leaf.nbytes for leaf in pytree.tree_leaves(list(optimizers[0].state.values())))
        padded = sum(-(-p.numel() // 16) * 16 for p in optimizers[1].param_groups[0]["params"])
        assert predicted == muon + 2 * 4 * padded
