"""Random training programs, and what the engine makes of them compared to plain PyTorch.

`tests/programs.py` is the command that runs them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ferryman
from support.programs import between, flow, gradients, losses, state, weights
from support.programs.model import LENGTH, Feature, Net, Sizes, make_loss, make_net
from support.programs.results import TOLERANCE, Result, attributes, differences, frozen, left_on, state_of

FEATURES: tuple[type[Feature], ...] = (
    *state.FEATURES,
    *flow.FEATURES,
    *gradients.FEATURES,
    *losses.FEATURES,
    *weights.FEATURES,
)

BETWEEN = 0.2  # the share of programs that have a feature of `between.py`, in which the loop changes the model
STEPS = 3
MAXIMISING = "sgd, maximising"
HANGS = 60.0  # seconds after which a run is taken to hang
AUTOCAST_TOLERANCE = 2e-2  # a last bit of bfloat16 is 4e-3
ONE_BY_ONE = "micro-batches give other results when they take turns"
SENSITIVE = 1e-6  # relative: how much weights are changed to see whether a program depends on their last bits


@dataclasses.dataclass
class Draft:
    """One build of a program. Each run has its own, since running it changes it."""

    sizes: Sizes
    features: tuple[Feature, ...]
    net: Net
    loss: Callable[[Any, Any], torch.Tensor]
    batches: list[Any]  # one for each step
    micro_batches: int
    optimizer: str
    groups: bool  # two of them, with different learning rates
    between_calls: bool  # whether the loop calls `forward_backward` and `update`
    options: dict[str, Any]  # of the engine
    device_options: dict[str, Any]  # of the engine on an accelerator

    def make_optimizer(self) -> torch.optim.Optimizer:
        rate = 1e-1 if "sgd" in self.optimizer else 1e-2
        groups: Any = list(self.net.parameters())
        if self.groups:
            blocks = list(self.net.blocks.parameters())
            within = {id(parameter) for parameter in blocks}
            groups = [{"params": blocks, "lr": rate / 3}, {"params": [p for p in groups if id(p) not in within]}]
        if "sgd" in self.optimizer:
            return torch.optim.SGD(groups, lr=rate, momentum=0.9, maximize=self.optimizer == MAXIMISING)
        # With a large epsilon: updates of gradients that are nearly zero would depend on their last bits.
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, lr=rate, weight_decay=0.1, eps=1e-4)


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    attempt: int = 0

    def begin(self) -> tuple[random.Random, Sizes, tuple[Feature, ...]]:
        """What is drawn first, and the generator to go on with."""
        rng = random.Random(1000 * self.seed + self.attempt)
        tokens = rng.random() < 0.35
        sizes = Sizes(
            width=rng.choice([8, 12, 16]),
            blocks=rng.randint(2, 6),
            classes=rng.choice([5, 11]) if tokens else 8,
            kind=rng.choice(["mlp", "gated", "attention"] if tokens else ["mlp", "gated"]),
            tokens=tokens,
        )
        if not tokens:
            sizes = dataclasses.replace(sizes, classes=sizes.width)  # so that the head can be tied to the inlet
        return rng, sizes, self._with_one_between(sizes, _draw_features(rng, sizes))

    def _with_one_between(self, sizes: Sizes, chosen: tuple[Feature, ...]) -> tuple[Feature, ...]:
        """With one more in some programs. It is drawn from another generator: the rest of a program does not change
        when features are added to these."""
        rng = random.Random(f"between {self.seed} {self.attempt}")
        if rng.random() > BETWEEN:
            return chosen
        feature = rng.choice(between.FEATURES)(rng, sizes)
        fits = all(not (a.traits & b.conflicts or b.traits & a.conflicts) for a, b in _pairs(feature, [*chosen]))
        return (*chosen, feature) if fits else chosen

    def draw(self) -> Draft:
        """The same each time."""
        rng, sizes, features = self.begin()
        torch.manual_seed(self.seed)
        net = make_net(sizes, features).train()
        micro_batches = rng.choice([1, 2, 2, 3, 4])
        optimizer = rng.choice(["adamw"] * 4 + ["adam"] * 2 + ["sgd"] * 3 + [MAXIMISING])
        options, device_options = _draw_options(rng, optimizer)
        if self.seed % 8 >= 6:
            options["recompute"] = "always"
        for feature in features:
            for name, value in feature.options().items():
                options[name] = [*options.get(name, []), *value]
        return Draft(
            sizes, features, net, make_loss(features), _draw_batches(rng, sizes, micro_batches), micro_batches,
            optimizer, rng.random() < 0.25,
            rng.random() < 0.1 or any(feature.between_calls for feature in features), options, device_options,
        )  # fmt: skip

    @functools.cached_property
    def features(self) -> list[str]:
        return [feature.name for feature in self.begin()[2]]

    @property
    def tolerance(self) -> float:
        return AUTOCAST_TOLERANCE if any(name.startswith("Autocast") for name in self.features) else TOLERANCE

    def __str__(self) -> str:
        return f"seed {self.seed}: {', '.join(self.features) or 'no features'}"


def _draw_features(rng: random.Random, sizes: Sizes) -> tuple[Feature, ...]:
    chosen: list[Feature] = []
    for _ in range(rng.choices([0, 1, 2, 3, 4], [1, 3, 4, 3, 2])[0]):
        kind = rng.choices(FEATURES, [kind.weight for kind in FEATURES])[0]
        feature = kind(rng, sizes)
        fits = all(not (a.traits & b.conflicts or b.traits & a.conflicts) for a, b in _pairs(feature, chosen))
        if kind.suits(sizes) and fits and kind not in map(type, chosen):
            chosen.append(feature)
    return tuple(chosen)


def _pairs(feature: Feature, others: list[Feature]) -> list[tuple[Feature, Feature]]:
    return [(feature, other) for other in others]


def _draw_options(rng: random.Random, optimizer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    options: dict[str, Any] = {
        "max_grad_norm": rng.choice([None, 0.5, 2.0]),
        "deferred": rng.random() < 0.25,
    }
    if rng.random() < 0.15:
        options["reduction"] = "sum"
    if rng.random() < 0.07:
        options["units"] = ["blocks.*.up", "blocks.*.down", "inlet", "head"]
    device_options: dict[str, Any] = rng.choice([
        {}, {}, {"slots": 2}, {"stash": "host"}, {"stash": "device"}, {"held": True}, {"memory": "64MiB"},
        {"updates": "static:0.5", "subgroup": 64}, {"updates": "stride:2", "subgroup": 64},
    ])  # fmt: skip
    if optimizer == MAXIMISING:
        device_options.pop("updates", None)  # devices do not update by this rule
    return options, device_options


def _draw_batches(rng: random.Random, sizes: Sizes, micro_batches: int) -> list[Any]:
    """Tuples, dictionaries, or lists of micro-batches that are ready; some have a last micro-batch that is smaller."""
    kind, ragged = rng.choice(["tuple", "tuple", "dict", "list"]), rng.random() < 0.2
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    each = rng.choice([2, 3])
    samples = each * micro_batches - (1 if ragged and micro_batches > 1 else 0)

    def batch() -> Any:
        shape = (samples, LENGTH) if sizes.tokens else (samples,)
        labels = torch.randint(0, sizes.classes, shape, generator=generator)
        if sizes.tokens:
            inputs = torch.randint(0, sizes.classes, shape, generator=generator)
        else:
            inputs = torch.randn(samples, sizes.width, generator=generator)
        if kind == "list":
            return list(zip(inputs.split(each), labels.split(each), strict=True))
        return {"inputs": inputs, "labels": labels} if kind == "dict" else (inputs, labels)

    return [batch() for _ in range(STEPS)]


def _cut(batch: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(batch, list):
        return batch
    inputs, labels = batch.values() if isinstance(batch, dict) else batch
    length = -(-len(inputs) // count)
    return list(zip(inputs.split(length), labels.split(length), strict=True))


# The plain loop.


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _set_up(draft: Draft, device: torch.device) -> torch.optim.Optimizer:
    for feature in draft.features:
        feature.set_up(draft.net, device)
    optimizer = draft.make_optimizer()
    for feature in draft.features:
        feature.see_optimizer(optimizer)
    _seed_all(7)
    return optimizer


def plain_results(program: Program, device: torch.device, change: float = 0.0) -> list[Result]:
    """Of gradient accumulation, after each step; `change`: relative, of the initial weights."""
    draft = program.draw()
    net = draft.net.to(device)
    if change:
        generator = torch.Generator().manual_seed(0)
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(device)
            parameter.data.mul_(1 + change * noise)
    optimizer = _set_up(draft, device)
    results, losses, read = [], [], []
    for batch in draft.batches:
        parts = _cut(batch, draft.micro_batches)
        weights = [len(inputs) / sum(len(part[0]) for part in parts) for inputs, _ in parts]
        if draft.options.get("reduction") == "sum":
            weights = [1.0] * len(parts)
        seed, total = int(torch.randint(0, 2**62, ())), 0.0
        with _generators_restored():
            for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                _seed_all(seed + number)
                content = tuple(tensor.to(device) for tensor in part)
                if isinstance(batch, dict):
                    content = dict(zip(batch, content, strict=True))
                loss = draft.loss(net, content) * weight
                loss.backward()
                total += loss.item()
        looked = [feature.after_backward(net) for feature in draft.features if draft.between_calls]
        if (limit := draft.options["max_grad_norm"]) is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        read.append(frozen([looked, [feature.after_step(net) for feature in draft.features]]))
        results.append(_result(draft, losses, read))
    return results


def run_plain(program: Program, device: torch.device) -> Result:
    return plain_results(program, device)[-1]


def _result(draft: Draft, losses: list[float], read: list[Any]) -> Result:
    logs = [frozen(feature.log) for feature in draft.features]
    return Result(list(losses), list(read), state_of(draft.net), left_on(draft.net), logs, _peek())


def _peek() -> list[float]:
    """What the global generators would draw next."""
    with _generators_restored():
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def make_program(seed: int) -> Program:
    """The first that plain PyTorch can run, and whose result does not depend on the last bits of its weights."""
    for attempt in itertools.count():
        program = Program(seed, attempt)
        try:
            plain = run_plain(program, torch.device("cpu"))
            changed = plain_results(program, torch.device("cpu"), SENSITIVE)[-1]
        except Exception:
            continue
        finite = all(tensor.isfinite().all() for tensor in plain.state.values())
        if finite and not differences(changed, plain, program.tolerance / 2):
            return program
    raise AssertionError("never reached")


# The engine.


class Outcome(NamedTuple):
    kind: str  # one of KINDS; "one by one": equal, but micro-batches could not take turns
    detail: str = ""  # the first differences, or the message of an error
    trace: str = ""  # of an error

    @property
    def is_good(self) -> bool:
        return self.kind in ("equal", "one by one", "refused")


EngineFactory = Callable[..., Any]


def run_engine(
    program: Program, device: torch.device, *, engine: EngineFactory = ferryman.Engine, patience: float = HANGS
) -> Outcome:
    """Runs it and compares with the plain loop on the same device."""
    plain = plain_results(program, device)
    outcomes: list[Outcome] = []

    def run() -> None:
        try:
            outcomes.append(_run(program, device, engine, plain))
        except BaseException as error:  # such as reading what the engine has left behind
            outcomes.append(Outcome("CRASH", f"afterwards: {error!r}", traceback.format_exc()))

    thread = threading.Thread(target=run, name="program", daemon=True)
    thread.start()
    thread.join(patience)
    return outcomes[0] if outcomes else Outcome("HANGS", f"for {patience:.0f} s")


def _run(program: Program, device: torch.device, engine_of: EngineFactory, plain: list[Result]) -> Outcome:
    draft = program.draw()
    optimizer = _set_up(draft, device)
    before, losses, read = state_of(draft.net), list[float](), list[Any]()
    options = {**draft.options, **({} if device.type == "cpu" else draft.device_options)}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.filterwarnings("always", ONE_BY_ONE)
            with engine_of(draft.net, optimizer, device=device, loss=draft.loss, **options) as engine:
                for batch in draft.batches:
                    losses.append(_step(engine, draft, batch, looked := []))
                    read.append(frozen([looked, [feature.after_step(draft.net) for feature in draft.features]]))
        ours = _result(draft, losses, read)
    except BaseException as error:  # whatever it is, it is an outcome
        return _judge(error, draft, before, losses, plain, program.tolerance)
    if found := differences(ours, plain[-1], program.tolerance):
        return Outcome("WRONG", _summary(found), "\n".join(found))
    told = [text for warning in warned if (text := str(warning.message)).startswith(ONE_BY_ONE)]
    return Outcome("one by one", told[0]) if told else Outcome("equal")


def _step(engine: Any, draft: Draft, batch: Any, looked: list[Any]) -> float:
    """What the user sees between backward and update is added to `looked`."""
    if not draft.between_calls:
        return engine.step(batch, draft.micro_batches).item()
    loss = engine.forward_backward(batch, draft.micro_batches).item()
    looked += [feature.after_backward(draft.net) for feature in draft.features]
    engine.update()
    return loss


def _judge(
    error: BaseException,
    draft: Draft,
    before: dict[str, torch.Tensor],
    losses: list[float],
    plain: list[Result],
    tolerance: float,
) -> Outcome:
    """Whether an error is a refusal: raised by Ferryman itself, with a cause, before weights have changed."""
    text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    if not _is_refusal(error):
        return Outcome("CRASH", text, trace)
    if not _names_cause(str(error), draft):
        return Outcome("CRASH", f"the refusal names no cause: {text}", trace)
    done = len(losses)
    after = state_of(draft.net)
    if done == 0:
        changed = [name for name, _ in draft.net.named_parameters() if not torch.equal(after[name], before[name])]
        if changed:
            return Outcome("WRONG", f"refused, but {len(changed)} weights have changed ({changed[0]}); {text}", trace)
        return Outcome("refused", text, trace)
    names = [name for name, _ in draft.net.named_parameters()]
    ours = Result(losses, state={name: after[name] for name in names})
    theirs = Result(plain[done - 1].losses, state={name: plain[done - 1].state[name] for name in names})
    if found := differences(ours, theirs, tolerance):
        return Outcome("WRONG", f"refused in step {done + 1}, but before: {_summary(found)}; {text}", trace)
    return Outcome("refused", f"in step {done + 1}: {text}", trace)


_PACKAGE = Path(ferryman.__file__).parent


def _is_refusal(error: BaseException) -> bool:
    if not isinstance(error, ValueError | RuntimeError):
        return False
    where = traceback.extract_tb(error.__traceback__)[-1]
    # Errors of torch's C++ code have no frame of their own, so the statement must be one that raises.
    return _PACKAGE in Path(where.filename).parents and (where.line or "").startswith("raise ")


def _names_cause(message: str, draft: Draft) -> bool:
    """It speaks of a feature, or gives the name of a module, a tensor or an attribute of the model."""
    if any(feature.cause and re.search(feature.cause, message, re.IGNORECASE) for feature in draft.features):
        return True
    names = {name for name, _ in draft.net.named_modules()} | set(draft.net.state_dict()) | set(attributes(draft.net))
    return any(quoted in names for quoted in re.findall(r"'([^']+)'", message))


def _summary(found: list[str]) -> str:
    return f"{found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


# The table.


def show_table(outcomes: dict[Program, Outcome], seconds: float) -> str:
    counts = collections.Counter(outcome.kind for outcome in outcomes.values())
    shares = "; ".join(f"{kind}: {counts[kind] / len(outcomes):.1%}" for kind in ("refused", "one by one"))
    lines = [f"{len(outcomes)} programs in {seconds:.0f} s: {dict(counts)}; {shares}", ""]
    by_feature: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for program, outcome in outcomes.items():
        for name in program.features or ["no features"]:
            by_feature[name.partition("(")[0]][outcome.kind] += 1
    lines.append("feature              " + "".join(f"{kind:>11}" for kind in KINDS))
    for name, kinds in sorted(by_feature.items()):
        lines.append(f"{name:21}" + "".join(f"{kinds[kind] or '':>11}" for kind in KINDS))
    for kind in KINDS[1:]:
        chosen = [(program, outcome) for program, outcome in outcomes.items() if outcome.kind == kind]
        if chosen:
            lines += ["", f"{kind}:"]
        for program, outcome in chosen:
            lines += [f"  {program}", f"      {outcome.detail.splitlines()[0][:240]}"]
    return "\n".join(lines)


KINDS = ("equal", "one by one", "refused", "WRONG", "HANGS", "CRASH")
