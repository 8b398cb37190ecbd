"""How fast an update's parts are."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rates:
    """What is calibrated at the start and then follows what is observed."""

    host: float  # parameters a second that the host updates, its look at the gradient included
    device: float  # parameters a second that the device updates, of what is there already
    link_in: float  # bytes a second, host to device
    link_out: float  # bytes a second, device to host
    duplex: bool = True  # both directions at once; else one at a time, as in the published code

    def following(
        self,
        *,
        host: float | None = None,
        device: float | None = None,
        link_in: float | None = None,
        link_out: float | None = None,
    ) -> Rates:
        """Most of the way towards the rates that were observed, in seconds per unit, since times are what adds up.

        Three quarters of it, because a change must be seen within a few steps, and one outlier must not decide: two
        steps after a rate has changed, fifteen sixteenths of the change are in.
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
