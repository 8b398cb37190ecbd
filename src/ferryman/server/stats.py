"""What the updates of a step were: who did how much, what crossed the link for it, and who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferryman.plan.rates import Rates
from ferryman.runtime.marks import Mark, busy_seconds, whole_seconds
from ferryman.server.device_updates import Done


@dataclass(frozen=True)
class Stats:
    """Of the last step that was updated. Parameters, bytes and seconds; rates in parameters a second."""

    step: int  # counted from 1, as `engine.steps` is once it has been made
    updates: str  # the policy
    device_share: float  # of the parameters, updated on the device
    bytes_in: int  # host to device, for updates
    bytes_out: int  # device to host, for updates; gradients that the host needs among them
    host_busy: float
    device_busy: float
    link_in_busy: float
    link_out_busy: float
    duplex: float  # of the time in which state crosses, the part in which it does so both ways
    host_waited: float  # for the device to be done, at the end
    device_waited: float  # for the host
    predicted_rate: float | None  # None: nothing was measured yet
    achieved_rate: float

    def __str__(self) -> str:
        predicted = "" if self.predicted_rate is None else f", {self.predicted_rate / 1e6:.0f} predicted"
        late = "the device" if self.host_waited > self.device_waited else "the host"
        return (
            f"step {self.step}, updates={self.updates}: {self.device_share:.0%} on the device, "
            f"{self.achieved_rate / 1e6:.0f} Mparam/s{predicted}; {self.bytes_in / 1e6:.1f} MB in, "
            f"{self.bytes_out / 1e6:.1f} MB out; {late} was last, by "
            f"{max(self.host_waited, self.device_waited) * 1e3:.1f} ms"
        )


@dataclass
class Record:
    """Collects a step's updates while they are asked for."""

    step: int  # how many were made before
    updates: str
    eager: bool
    rates: Rates | None  # with which it was split
    observed: bool = False  # whether those follow the step before
    noted: bool = False  # whether it is in the trace
    predicted_rate: float | None = None
    on_host: int = 0  # parameters
    on_device: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    host: list[Mark] = field(default_factory=list)
    device: list[Mark] = field(default_factory=list)
    came: list[Mark] = field(default_factory=list)
    went: list[Mark] = field(default_factory=list)
    returned: list[Mark] = field(default_factory=list)  # weights that the host has updated, and the device holds

    def by_host(self, mark: Mark, size: int) -> None:
        self.host.append(mark)
        self.on_host += size

    def by_device(self, done: Done, size: int) -> None:
        self.device.append(done.used)
        self.came += done.came
        self.went.append(done.ended)
        self.bytes_in += done.bytes_in
        self.bytes_out += done.bytes_out
        self.on_device += size

    @property
    def is_over(self) -> bool:
        return all(mark.passed() for mark in (*self.host, *self.device, *self.came, *self.went, *self.returned))

    def stats(self) -> Stats:
        """All of it has passed."""
        busy = [busy_seconds(marks) for marks in (self.host, self.device, self.came, self.went)]
        crossed, either = busy[2] + busy[3], busy_seconds([*self.came, *self.went])
        device_span = whole_seconds([*self.came, *self.device, *self.went])
        host_span = whole_seconds(self.host)
        total = self.on_host + self.on_device
        # Beside a backward, updates are paced by it: then what the busiest lane could do is the rate.
        seconds = max(busy) if self.eager else max(host_span, device_span)
        return Stats(
            step=self.step + 1,
            updates=self.updates,
            device_share=self.on_device / total if total else 0.0,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            host_busy=busy[0],
            device_busy=busy[1],
            link_in_busy=busy_seconds([*self.came, *self.returned]),
            link_out_busy=busy[3],
            duplex=(crossed - either) / either if either else 0.0,
            host_waited=max(0.0, device_span - host_span),
            device_waited=max(0.0, host_span - device_span),
            predicted_rate=self.predicted_rate,
            achieved_rate=total / seconds if seconds else 0.0,
        )
