"""What a call needs of the driver that serves it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ferryman.model.units import Unit
from ferryman.relay.kept_graph import SavedTensors
from ferryman.relay.micro_batch import MicroBatch
from ferryman.runtime.rng import Randomness

if TYPE_CHECKING:
    from ferryman.exactness.buffers import Buffers
    from ferryman.exactness.escapes import Escapes
    from ferryman.exactness.user_state import UserState
    from ferryman.relay.call import Call
    from ferryman.relay.checksums import Checksums
    from ferryman.relay.step_state import StepState


class CallDriver(Protocol):
    """The interface that a call uses. The relay implements it for steps, and the dry run for `ferryman plan`."""

    state: UserState
    buffers: Buffers
    checksums: Checksums
    escapes: Escapes
    randomness: Randomness
    autocast_devices: list[str]  # device types for which autocast may be enabled
    anchor: torch.Tensor  # a scalar that requires a gradient
    graph_needed: set[Unit]  # units whose code uses the graph of its first run
    without_graph: set[Unit]  # units whose code cannot run with a graph that saves nothing
    computes_in_own_threads: bool  # micro-batches compute units in their own threads, and not the driver in its thread
    inside: dict[Unit, list[nn.Module]]  # the modules of each unit

    @property
    def step(self) -> StepState:
        """The current step."""

    @property
    def running(self) -> MicroBatch | None:
        """The micro-batch whose code is running."""

    def trains(self, unit: Unit) -> bool:
        """Whether any parameter that the unit's modules use requires a gradient."""

    def turns_at(self, module: nn.Module) -> bool:
        """Whether the module's backward is expected to follow its forward at once."""

    def keeps(self, call: Call) -> bool:
        """Whether the call's graph is kept until its backward."""

    def cannot_keep(self, unit: Unit) -> None:
        """Called when graphs of the unit turn out to be ones that cannot last."""

    def saving(self, unit: Unit) -> SavedTensors | None:
        """Hooks for what a graph of the visited unit saves, if the graph lasts. None: it needs none."""

    def bound(self, unit: Unit, *, adopt: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which the unit's modules have the device's tensors. `adopt`: keep buffers that they assign."""

    def goes_backward(self, call: Call, *, accumulate: bool) -> None:
        """Called before the call's backward. `accumulate`: the backward adds to the gradients of parameters."""

    def note_leaves(self, unit: Unit, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Called before a backward in the unit, from `outputs` to `inputs`: saves the gradients of leaves outside the
        model, which it may change."""
