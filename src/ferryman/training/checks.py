"""Validation of the user's models, devices and blocks. Each error says what is required, what was found, and how to fix
it. The value of each setting is checked where the setting is declared (`options.py`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.model.compilation import check_backend, is_wrapper
from ferryman.model.members import no_hooks
from ferryman.model.overlaps import refuse_overlaps
from ferryman.model.patching import is_taken
from ferryman.model.precision import PRECISIONS
from ferryman.model.units import DtypeOf, Unit
from ferryman.options import SETTINGS, EngineOptions, Optimizers, PlainOptions
from ferryman.runtime.sizes import show_bytes


def usable(*, closed: bool, rank_has_failed: bool) -> None:
    """Checks that an engine can still be used."""
    if closed:
        raise ValueError("the engine is closed; make a new one to train the model further")
    if rank_has_failed:
        raise ValueError(
            "a rank has failed, and the ranks are no longer in the same state; make a new engine on all ranks, and "
            "load the last checkpoint"
        )


def model(model: Any) -> None:
    """Checks that this is a model whose modules can run one at a time."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module; this is a {type(model).__name__}")
    if is_wrapper(model):
        raise ValueError(
            "the model was compiled as a whole (torch.compile), and the engine runs its blocks one at a time; pass the "
            "original model, and let the engine compile the blocks: Engine(model._orig_mod, ..., compile=True)"
        )
    _modules(model)


def _modules(model: nn.Module) -> None:
    """Refuses modules that cannot be streamed."""
    for name, module in model.named_modules():
        where = f"the module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in (*module.parameters(), *module.buffers())):
            raise ValueError(
                f"{where} is a ScriptModule (torch.jit), whose weights the engine cannot move; pass the engine the "
                "original module"
            )
        if any(nn.parameter.is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            raise ValueError(
                f"{where} is a {type(module).__name__} whose parameters have no shape yet; call the model once with a "
                "batch before you make the engine"
            )
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise ValueError(f"{where} is quantized ({type(module).__name__}) and does not train; quantize afterwards")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"{where} has sparse gradients, which the engine cannot accumulate; use sparse=False")


def arguments(
    model: nn.Module,
    optimizer: Optimizers | None,
    options: EngineOptions,
    device: torch.device,
    dtype_of: DtypeOf,
) -> None:
    """Checks that the arguments of an engine fit each other and the device."""
    settings(options, device)
    available(model)
    if optimizer is None:
        _no_settings_of_updates(options)
    parameters(model.named_parameters(), dtype_of)
    refuse_overlaps((*model.named_parameters(), *model.named_buffers()))


def parameters(named: Iterable[tuple[str, torch.Tensor]], dtype_of: DtypeOf) -> None:
    """Checks the dtypes and hooks of parameters. `dtype_of` gives the dtype in which each would travel."""
    for name, parameter in named:
        no_hooks(name, parameter)
        dtype = dtype_of(name, parameter)
        if not parameter.requires_grad or dtype in PRECISIONS.values():
            continue
        way_out = "use model.float(), or precision='fp32', which converts it while the engine has the model"
        if dtype.is_complex:
            way_out = "store real and imaginary parts in a real one, and use torch.view_as_complex in the forward"
        raise ValueError(
            f"{name!r} trains in {dtype}, but the engine trains float32, bfloat16 and float16 only: gradients and "
            f"optimizer state are in float32. Freeze it (requires_grad_(False)), or {way_out}"
        )


def available(model: nn.Module) -> None:
    """Checks that the model is on the host, and that no engine has it."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"the model must be on the host, and {name!r} is on {tensor.device}; use model.cpu()")
    if any(is_taken(module) for module in model.modules()):
        raise ValueError("the model has an engine already; close it first: engine.close()")


def block(block: Any, model: nn.Module, dtype_of: DtypeOf) -> None:
    """Checks that a block can be inserted into the model."""
    if not isinstance(block, nn.Module):
        raise ValueError(f"a block must be a torch.nn.Module; this is a {type(block).__name__}")
    mine = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if any(id(tensor) in mine for tensor in (*block.parameters(), *block.buffers())):
        raise ValueError("the block shares a parameter or buffer with the model; insert a block with its own")
    available(block)
    parameters(block.named_parameters(prefix="block"), dtype_of)
    named = (*block.named_parameters(prefix="block"), *block.named_buffers(prefix="block"))
    refuse_overlaps((*named, *model.named_parameters(), *model.named_buffers()))


def one_by_one(blocks: nn.Module, units: Sequence[Unit]) -> None:
    """Checks that the blocks of a list can be inserted and removed one at a time."""
    for unit in units:
        if any(blocks in set(module.modules()) for module in unit.modules):
            raise ValueError(
                f"these blocks travel together as the unit {unit.name!r}, so none can be inserted or removed; leave "
                "units= out, or name what is in the blocks or the blocks themselves"
            )


def removable(block: nn.Module, position: int | str, units: Sequence[Unit], residents: Unit) -> None:
    """Checks that a block can be removed: none of its tensors is used elsewhere."""
    inside = set(block.modules())
    for unit in (*units, residents):
        for item in unit.items:
            places = [place.module in inside for place in item.places]
            if any(places) and not (all(places) and (unit is residents or inside.issuperset(unit.modules))):
                raise ValueError(
                    f"the block {position!r} shares parameters with the rest of the model, so it has to stay"
                )
            if any(places) and unit is residents:
                raise ValueError(
                    f"{item.name!r} of the block {position!r} stays on the device (see units= and resident=), and so "
                    "the block has to stay in the model"
                )


def real_device(device: torch.device | str | None, place: int | None = None) -> torch.device:
    """The device with its index, so that it equals the device of tensors on it. `place`: this rank's number on its
    node, if each rank has a device of its own."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator
    try:
        asked: torch.device = torch.device(device)
        if place is not None and str(asked) == asked.type and asked.type not in ("cpu", "meta"):  # without a number
            device = torch.device(asked.type, place % _count())
        found = torch.empty(0, device=device, dtype=torch.float32).device
        if found.type == "meta":
            raise ValueError("nothing can be computed on meta; the model may be on meta, but the device must be real")
    except Exception as error:
        usual = torch.accelerator.current_accelerator()
        known = "'cpu'" if usual is None else f"'cpu' and {usual.type!r} (of which there are {_count()})"
        if str(device).partition(":")[0] == "virtual" and "torch_virtual" not in sys.modules:
            raise ValueError(
                f"device={str(device)!r} needs torch_virtual, which was not imported: import torch_virtual first. It "
                "is in the folder virtual/ of Ferryman's repository"
            ) from error
        raise ValueError(f"device={str(device)!r} cannot be used here ({error}); there is {known}") from error
    return torch.device("cpu") if found.type == "cpu" else found


def _count() -> int:
    return torch.accelerator.device_count()


def budget(budget: int | None, device: torch.device) -> None:
    if budget is None:
        return
    if device.type == "cpu":
        raise ValueError(
            f"memory={show_bytes(budget)} is a budget for an accelerator's memory, and device='cpu' has none of its own"
        )
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (NotImplementedError, RuntimeError):  # not every device reports it
        return
    if budget > total:
        raise ValueError(f"memory={show_bytes(budget)} is more than {str(device)!r} has ({show_bytes(total)})")
    # Memory that only this process's allocator holds is given back to the device when the engine is made.
    held = torch.accelerator.memory_allocated(device)
    free += torch.accelerator.memory_reserved(device) - held
    if budget > free:
        raise ValueError(
            f"memory={show_bytes(budget)} is more than is free on {str(device)!r}: {show_bytes(free)} of "
            f"{show_bytes(total)}. Tensors of this process hold {show_bytes(held)}, and other processes "
            f"{show_bytes(max(0, total - free - held))}. Free what is not needed, or specify memory={free} or less"
        )


def settings(options: PlainOptions, device: torch.device) -> None:
    """Checks that the settings are compatible with each other and with the device."""
    budget(options.budget, device)
    if options.compile:
        check_backend(device)
    if options.held and device.type == "cpu":
        raise ValueError("held=True keeps all weights on an accelerator, and device='cpu' is the host itself")
    if options.held and options.slots is not None:
        raise ValueError(
            f"held=True keeps all weights on the device, so slots={options.slots} has no meaning; leave one out"
        )


def _no_settings_of_updates(options: EngineOptions) -> None:
    """Refuses settings of updates in an engine without an optimizer."""
    for name, setting in SETTINGS.items():
        if setting.needs_optimizer and getattr(options, name) != getattr(EngineOptions, name):
            raise ValueError(f"{name}= is about updates, so the engine needs the optimizer: Engine(model, optimizer)")


def can_step(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """`modules`: all modules of the model."""
    if not torch.is_grad_enabled():
        raise ValueError("a step needs gradients, and they are switched off here (torch.no_grad or inference_mode)")
    for module in modules:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            name = next(name for name, other in model.named_modules() if other is module)
            raise ValueError(
                f"the module {name!r} is a {type(module).__name__} in training mode: its output for a sample depends "
                "on the other samples of its micro-batch, and its statistics would be updated twice, since units run "
                "again in the backward. Freeze it (module.eval()), or normalize within samples (LayerNorm)"
            )
