"""The devices' own random numbers, apart from the CPU's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_virtual import _C
from torch_virtual._device import Device, device_count, index_of


class _Generators(Sequence[torch.Generator]):
    """As `torch.cuda.default_generators`; devices may be added later."""

    def __getitem__(self, index: int) -> torch.Generator:  # type: ignore[override]
        return _C.generator(index)

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def get_rng_state(device: Device = None) -> torch.Tensor:
    return _C.generator(index_of(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    _C.generator(index_of(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for i, state in enumerate(states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seeds the current device. `torch.manual_seed` seeds the CPU and all of them."""
    _C.generator(index_of()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for i in range(device_count()):
        _C.generator(i).manual_seed(seed)


def seed() -> int:
    return _C.generator(index_of()).seed()


def initial_seed() -> int:
    return _C.generator(index_of()).initial_seed()


def _is_in_bad_fork() -> bool:
    return _C.forked()
