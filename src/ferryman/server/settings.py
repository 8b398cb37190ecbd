"""What the user has asked for about updates, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.model.precision import Scale


@dataclass(frozen=True)
class Settings:
    max_grad_norm: float | None = None
    on_nonfinite: str = "raise"
    deferred: bool = False
    threads: int | None = None


def is_eager(settings: Settings, scale: Scale) -> bool:
    """Whether nothing needs the whole gradient before the first weight changes."""
    waits = settings.deferred or settings.max_grad_norm is not None or settings.on_nonfinite == "skip"
    return not (waits or scale.moves)
