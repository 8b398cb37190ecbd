"""The rates of the parts of an update."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rates:
    """Rates that are calibrated at the start and then follow observation."""

    host: float  # parameters per second that the host updates, including the check of their gradients
    device: float  # parameters per second that the device updates, once their state is on the device
    link_in: float  # bytes per second, host to device
    link_out: float  # bytes per second, device to host
    duplex: bool = True  # both directions at once; False: one at a time, as in the published code

    def following(
        self,
        *,
        host: float | None = None,
        device: float | None = None,
        link_in: float | None = None,
        link_out: float | None = None,
    ) -> Rates:
        """Moves three quarters of the way towards the observed rates, averaging times and not rates.

        So a change shows within a few steps, and a single outlier does not decide: two steps after a rate has changed,
        fifteen sixteenths of the change are included.
        """
        return replace(
            self,
            host=_most_of_the_way(self.host, host),
            device=_most_of_the_way(self.device, device),
            link_in=_most_of_the_way(self.link_in, link_in),
            link_out=_most_of_the_way(self.link_out, link_out),
        )


def _most_of_the_way(rate: float, observed: float | None) -> float:
    return rate if observed is None else 1 / (0.25 / rate + 0.75 / observed)
