"""The engine: wires the parts together. Read from here.

`Engine.forward_backward` cuts a batch into micro-batches (`batch.py`) and gives them to the relay (`relay/relay.py`),
which runs the user's code and moves units (`units.py`) between the server's store (`server/store.py`) and the device's
slots (`relay/slots.py`), on lanes (`lanes.py`). A budget of device memory is kept by the plan (`cost/plan.py`) and by
the size of micro-batches (`relay/fit.py`). Blocks come and go between steps (`blocks.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ferryman.batch import samples_in, split
from ferryman.blocks import Blocks, Position
from ferryman.checks import (
    check_apart,
    check_arguments,
    check_block,
    check_budget,
    check_can_step,
    check_free,
    check_loss,
    check_own,
    real_device,
)
from ferryman.cost.plan import Need, Plan, make_plan
from ferryman.cost.sizes import parse_bytes, show_bytes
from ferryman.lanes import Lanes
from ferryman.relay.fit import Choice, Fit, TooLargeError, Trial
from ferryman.relay.relay import Relay
from ferryman.server.store import RamStore
from ferryman.trace import Trace
from ferryman.units import Unit, gradient_views, rename, units_of_block

Loss = Callable[[nn.Module, Any], torch.Tensor]


def model_loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
    """The default: what the model itself calls its loss."""
    output = model(*micro_batch) if isinstance(micro_batch, tuple) else model(**micro_batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            f"the model returned a {type(output).__name__} without a loss. If it computes one from labels, put them "
            "into the batch; else pass loss=, a function of the model and a micro-batch that returns the loss"
        )
    return loss  # type: ignore[no-any-return]


class Engine:
    """Trains a model that may be larger than the device.

    `memory` is a budget of device memory ("8GiB"): blocks are cut, and slots, the stash's place and the size of
    micro-batches chosen, such that it is kept. `units` names the modules that travel, by name or pattern; without it
    they are found. `resident` names parameters that stay on the device. `stash="host"` keeps what waiting micro-batches
    hold on the host, and device memory constant; on the "device" it is faster and grows with depth and micro-batches;
    "auto" is the device as long as the budget allows. `slots` is how many units' weights the device holds at once.
    `trace` records what ran when.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        memory: int | str | None = None,
        loss: Loss = model_loss,
        units: Sequence[str] | None = None,
        resident: Sequence[str] = (),
        stash: str = "auto",
        slots: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        check_arguments(model, units=units, resident=resident, stash=stash, slots=slots)
        self.device = real_device(device)
        self._budget = None if memory is None else parse_bytes(memory, "memory")
        check_budget(self._budget, self.device)
        check_free(model)
        self._model = model
        self._loss = loss
        self._stash = stash
        self._trace = trace
        self._make_plan = functools.partial(
            make_plan, model, budget=self._budget, slots=slots, units=units, resident=resident
        )
        self._blocks = Blocks(model, self.device)
        self._to_skip: frozenset[nn.Module] = frozenset()  # in the next step
        # What instances had for `forward` of their own, to be put back; usually nothing.
        self._forwards: dict[nn.Module, Callable[..., Any] | None] = {}
        self.choice: Choice | None = None  # of the last step: how many micro-batches, and where the stash was
        self._stepping = False
        self._closed = False
        self._build(self._make_plan())

    def forward_backward(self, batch: Any, micro_batches: int | None = None) -> torch.Tensor:
        """The micro-batches' mean loss, weighted by their samples; gradients are added to the parameters' `.grad`.

        Without `micro_batches` the batch is cut into as few as the memory budget allows; without a budget, it is one.
        A model that averages over tokens (padding, labels of -100) averages within each micro-batch, as in any loop.
        """
        self._check_model()
        choice = self.choice = self._choose(batch, micro_batches)
        parts = split(batch, choice.micro_batches)
        seed = int(torch.randint(0, 2**62, ()).item())
        # As with plain autograd: what the user has cleared starts anew.
        cleared = [item for unit in self._all_units() for item in unit.trained if item.tensor.grad is None]
        self._relay.clear_gradients_of(cleared)
        self._blocks.skipped, self._to_skip = self._to_skip, frozenset()
        without = [unit for unit in self.units if self._is_skipped(unit)]
        try:
            with self._step():
                works = [self._work(part.content, part.weight) for part in parts]
                total = self._relay.run(works, seed, stash_on_host=choice.stash_on_host, without=without)
        except torch.OutOfMemoryError as error:
            error.add_note(self._about_memory(choice))
            raise
        finally:
            self._blocks.skipped = frozenset()
        self._relay.finish()
        for unit in self._all_units():
            for item, view in gradient_views(unit, self._store.gradients(unit)).items():
                item.tensor.grad = view.to(item.tensor.dtype) if self._relay.has_gradient(item) else None
        return total

    def skip(self, blocks: Position | Iterable[Position]) -> None:
        """In the next step these blocks hand their input on: they are neither fetched nor do they get gradients."""
        positions = [blocks] if isinstance(blocks, int | str) else blocks
        self._to_skip = frozenset(self._blocks.at(position) for position in positions)

    def insert(self, position: Position, block: nn.Module) -> None:
        """From now on the block runs at this position of the model; those from there on move up.

        A configuration's `num_hidden_layers` that counted the blocks is raised, and blocks that know their position
        (`layer_idx`) learn the new one.
        """
        self._check_open()
        check_block(block, self._model)
        check_apart(self._blocks.list_at(position), self.units)
        self._blocks.insert(position, block)
        added = units_of_block(self._model, block, self.plan.limit)
        order = {module: i for i, module in enumerate(self._model.modules())}
        units = sorted((*self.units, *added), key=lambda unit: min(order[module] for module in unit.modules))
        plan = dataclasses.replace(self.plan, units=tuple(units))
        if self._budget is not None and plan.fixed > self._budget:
            self._blocks.remove(block)
            raise ValueError(
                f"with this block {show_bytes(plan.fixed)} would always be on the device, where "
                f"memory={show_bytes(self._budget)}: {plan.explain()}"
            )
        for unit in added:
            self._store.add(unit)
        self._serve(plan)
        self._take_over(added)
        self._replace(block, self._blocks.skippable(block, block.forward))

    def remove(self, position: Position) -> nn.Module:
        """Takes the block out of the model, and returns it with its weights as they are now."""
        self._check_open()
        block = self._blocks.at(position)
        inside = set(block.modules())
        check_apart(self._blocks.list_at(position), self.units)
        check_own(block, position, self.units, self.plan.residents)
        gone = [unit for unit in self.units if inside.issuperset(unit.modules)]
        if len(gone) == len(self.units):
            raise ValueError(f"the block {position!r} is the last one that travels; nothing would be left to train")
        self._blocks.remove(block)
        self._serve(dataclasses.replace(self.plan, units=tuple(unit for unit in self.units if unit not in gone)))
        for unit in gone:
            self._store.remove(unit)
        for module in inside & set(self._forwards):
            self._give_back(module)
        return block

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.plan.units

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._relay.clear_gradients()
        for parameter in self._model.parameters():
            parameter.grad = None

    @property
    def fetches(self) -> int:
        return self._relay.fetches

    def close(self) -> None:
        """Gives the model back as it came, with its weights as they are now."""
        self._closed = True
        self._tear_down()

    def _build(self, plan: Plan) -> None:
        self.plan = plan
        self._store = RamStore(self._all_units(), self.device)
        self._lanes = Lanes(self.device, trace=self._trace)
        self._relay = Relay(plan, self.device, self._store, self._lanes)
        self._fit = self._new_fit()
        self._take_over(plan.units)
        for block in self._blocks:
            self._replace(block, self._blocks.skippable(block, block.forward))
        self._replace(self._model, self._outside_steps(self._model.forward))

    def _tear_down(self) -> None:
        try:
            self._lanes.close()
        finally:
            for module in list(self._forwards):
                self._give_back(module)
            self._relay.close()
            self._store.close()

    def _serve(self, plan: Plan) -> None:
        """The model's blocks have changed."""
        self._lanes.wait()  # a unit that was expected, and not used, may still be on its way
        self.plan = plan
        self._fit = self._new_fit()
        rename(self._model, self._all_units())
        self._relay.serve(plan.units)

    def _all_units(self) -> tuple[Unit, ...]:
        return (*self.plan.units, self.plan.residents)

    def _take_over(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for module in unit.modules:
                self._replace(module, self._relay.intercept(unit, module, module.forward))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._forwards.setdefault(module, module.__dict__.get("forward"))
        forward.of_an_engine = True  # type: ignore[attr-defined]  # so that a second engine is refused
        module.__dict__["forward"] = forward

    def _give_back(self, module: nn.Module) -> None:
        own = self._forwards.pop(module)
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    def _work(self, content: Any, weight: float) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            here = _to(content, self.device)
            self._relay.adopt([x for x in pytree.tree_leaves(here) if isinstance(x, torch.Tensor)])
            loss = self._loss(self._model, here)
            check_loss(loss)
            return loss * weight

        return run

    # Memory.

    def _new_fit(self) -> Fit | None:
        return None if self._budget is None else Fit(self._budget, self._stash, self._try_out)

    def _choose(self, batch: Any, micro_batches: int | None) -> Choice:
        """How the batch is cut, and where the stash is."""
        ready = isinstance(batch, list)
        parts = split(batch, micro_batches)  # also to refuse what cannot be cut before it is tried
        sample = max((part.content for part in parts), key=lambda content: samples_in(content) or 0) if ready else batch
        size = samples_in(sample)
        if self._fit is None or size is None:
            return Choice(len(parts), self._stash == "host")
        count = len(parts) if ready else micro_batches
        while True:
            try:
                if not ready:
                    return self._fit.choose(sample, size, count, self.plan.fixed)
                return self._fit.choose(sample, size * len(parts), count, self.plan.fixed)
            except TooLargeError as error:
                self._make_room(error.need)

    def _try_out(self, contents: list[Any]) -> Trial:
        assert self._budget is not None
        try:
            with self._step():
                return self._relay.try_out([self._work(content, 1 / len(contents)) for content in contents])
        except torch.OutOfMemoryError as error:
            room = self._budget - self.plan.fixed
            raise TooLargeError(Need(room + 1, f"a trial of {len(contents)} micro-batches")) from error

    def _make_room(self, needed: Need) -> None:
        """A smaller plan, now that it is known what one sample needs; a ValueError if there is none."""
        assert self._budget is not None
        plan = self._make_plan(needed=needed)
        if any(self._relay.has_gradient(item) for unit in self._all_units() for item in unit.trained):
            raise ValueError(
                f"a micro-batch of one sample needs {show_bytes(needed.nbytes)} in {needed.where!r} beside "
                f"{show_bytes(self.plan.fixed)} that are always there; memory={show_bytes(self._budget)} is too small "
                "for it while gradients are being accumulated. Update or clear them (engine.zero_grad()) first"
            )
        self._tear_down()
        self._build(plan)

    def _about_memory(self, choice: Choice) -> str:
        place = "host" if choice.stash_on_host else "device"
        return (
            f"ferryman has {show_bytes(self.plan.fixed)} on the device all the time, {self.plan.explain()}; the stash "
            f"is on the {place}, micro-batches: {choice.micro_batches}. memory='...' gives the engine a budget to "
            "keep; stash='host' and more micro_batches need less"
        )

    # What may be wrong.

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed; make a new one to train the model further")

    def _check_values(self) -> None:
        if (item := self._store.without_values()) is not None:
            raise ValueError(
                f"{item.name!r} was on the meta device and has not been given values yet: load weights first "
                "(model.load_state_dict(...)). Buffers that are not in a state_dict have to be set, too, in place"
            )

    def _check_model(self) -> None:
        self._check_open()
        self._check_values()
        for unit in self._all_units():
            flat = self._store.weights(unit)
            for item in unit.items:
                if any(place.current() is not item.tensor for place in item.places) or (
                    item.tensor.data_ptr() != flat.data_ptr() + item.offset and item.nbytes
                ):
                    raise ValueError(
                        f"the memory of {item.name!r} was replaced while the model was in the engine (by .to(), "
                        ".data = or load_state_dict(assign=True)), so the engine would train the old one. Change "
                        "weights in place (copy_, load_state_dict), or close the engine and make a new one"
                    )
        check_can_step(self._model)

    def _is_skipped(self, unit: Unit) -> bool:
        inside = {module for block in self._blocks.skipped for module in block.modules()}
        return inside.issuperset(unit.modules)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Caches are off within: running a unit again in the backward would fill them twice."""
        configs: list[Any] = [getattr(module, "config", None) for module in self._model.modules()]
        before = [(config, config.use_cache) for config in configs if hasattr(config, "use_cache")]
        self._stepping = True
        try:
            for config, _ in before:
                config.use_cache = False
            yield
        finally:
            self._stepping = False
            for config, use_cache in reversed(before):
                config.use_cache = use_cache

    def _outside_steps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's own forward; outside steps, on a device, its units come over as it calls them."""

        def streamed(*args: Any, **kwargs: Any) -> Any:
            if self._stepping:
                return forward(*args, **kwargs)
            self._check_values()
            if self.device.type == "cpu":
                return forward(*args, **kwargs)
            if torch.is_grad_enabled():
                raise ValueError(
                    "outside a step the model runs without gradients: call it under torch.no_grad(), or train with "
                    "engine.forward_backward(batch)"
                )
            home = next((x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
            with self._relay.evaluating():
                args, kwargs = _to((args, kwargs), self.device)
                result = forward(*args, **kwargs)
            return result if home is None else _to(result, home)

        return streamed

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A failure of closing must not hide the exception that is on its way.
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.close()


def _to(part: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, part)
