"""`virtual`: a PyTorch accelerator for machines that have none.

    import torch, torch_virtual
    x = torch.randn(4, device="virtual")

It behaves as an accelerator does: memory that the host cannot read and that runs out, streams and events, copies that
are asynchronous from pinned memory and take their time over a link. What PyTorch offers for any accelerator
(`torch.accelerator`, `torch.Stream`, `torch.Event`, `torch.Generator`) is used through PyTorch; what only a virtual
device has is here: its capacity, its link, its counters and its race detector.
"""

import sys

import torch

if torch._C._get_privateuse1_backend_name() != "privateuseone":
    raise ImportError(
        "torch_virtual needs PyTorch's PrivateUse1 device, which is taken in this process by "
        f"{torch._C._get_privateuse1_backend_name()!r}"
    )

from torch_virtual._counters import Counters, Watch, counters, watch
from torch_virtual._device import (
    current_device,
    current_stream,
    default_stream,
    device,
    device_count,
    get_amp_supported_dtype,
    init,
    is_available,
    is_initialized,
    set_device,
    set_device_count,
    set_stream,
    synchronize,
)
from torch_virtual._event import Event
from torch_virtual._link import Link, link, set_link
from torch_virtual._memory import (
    CUDA,
    EXACT,
    Caching,
    caching,
    capacity,
    empty_cache,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    register_host,
    reset_peak_memory_stats,
    set_caching,
    set_capacity,
    set_per_process_memory_fraction,
    unregister_host,
)
from torch_virtual._races import (
    Instant,
    clear_races,
    host_reads,
    host_writes,
    label,
    learn,
    now,
    own_clock,
    race_count,
    races,
    strict,
)
from torch_virtual._random import (
    _is_in_bad_fork,  # noqa: F401 - torch.manual_seed asks
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    set_rng_state,
    set_rng_state_all,
)
from torch_virtual._strictness import (
    bytes_copied_by_fork,
    contexts,
    follow_environment,
    no_float64,
    pinned_limit,
    set_workspace,
    streams_in_use,
    whole_pages,
    workspace,
)

__all__ = [
    "CUDA",
    "EXACT",
    "Caching",
    "Counters",
    "Event",
    "Instant",
    "Link",
    "Watch",
    "bytes_copied_by_fork",
    "caching",
    "capacity",
    "clear_races",
    "contexts",
    "counters",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "host_reads",
    "host_writes",
    "init",
    "initial_seed",
    "is_available",
    "is_initialized",
    "label",
    "learn",
    "link",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "no_float64",
    "now",
    "own_clock",
    "pinned_limit",
    "race_count",
    "races",
    "register_host",
    "reset_peak_memory_stats",
    "seed",
    "set_caching",
    "set_capacity",
    "set_device",
    "set_device_count",
    "set_link",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_workspace",
    "streams_in_use",
    "strict",
    "synchronize",
    "unregister_host",
    "watch",
    "whole_pages",
    "workspace",
]

_initialized = True  # torch.utils.checkpoint keeps the random state only of devices that say so

device_count()  # reads TORCH_VIRTUAL_DEVICES, here, where a wrong value can be told
follow_environment()
torch.utils.rename_privateuse1_backend("virtual")
torch._register_device_module("virtual", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
