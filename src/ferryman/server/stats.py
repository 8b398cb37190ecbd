"""Statistics of a step's updates: how much host and device updated, what crossed the link for it, and who waited."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ferryman.plan.keep import CallCounts
from ferryman.plan.rates import Rates
from ferryman.runtime.marks import Mark, busy_seconds, whole_seconds


@dataclass(frozen=True)
class Stats:
    """Updates of one step. Times are in seconds, rates in parameters per second."""

    step: int  # counted from 1: equal to `engine.steps` after the step
    updates: str  # the policy
    device_share: float  # share of the parameters that the device has updated
    bytes_in: int  # host to device, for updates
    bytes_out: int  # device to host, for updates, including gradients that the host uses
    host_busy: float
    device_busy: float
    link_in_busy: float
    link_out_busy: float
    duplex: float  # of the time in which state crosses the link, the share in which it crosses in both directions
    host_waited: float  # at the end, until the device was done
    device_waited: float  # at the end, until the host was done
    predicted_rate: float | None  # None: no rate has been measured yet
    achieved_rate: float
    calls: CallCounts | None = None  # of the last forward and backward

    def __str__(self) -> str:
        predicted = "" if self.predicted_rate is None else f", {self.predicted_rate / 1e6:.0f} predicted"
        late = "the device" if self.host_waited > self.device_waited else "the host"
        return (
            f"step {self.step}, updates={self.updates}: {self.device_share:.0%} on the device, "
            f"{self.achieved_rate / 1e6:.0f} Mparam/s{predicted}; {self.bytes_in / 1e6:.1f} MB in, "
            f"{self.bytes_out / 1e6:.1f} MB out; {late} was last, by "
            f"{max(self.host_waited, self.device_waited) * 1e3:.1f} ms{'' if self.calls is None else f'; {self.calls}'}"
        )


class DeviceUpdate(NamedTuple):
    """The marks of one update on the device, and the bytes that crossed the link for it."""

    used: Mark  # the gradient may be overwritten; weights that stay on the device are updated
    ended: Mark  # the host has the new weights and state
    bytes_in: int
    bytes_out: int
    state_in: list[Mark]  # copies to the device: at most one


@dataclass
class StepRecord:
    """Collects the marks of a step's updates while they are submitted."""

    step: int  # the number of steps before this one
    updates: str  # the policy
    eager: bool
    rates: Rates | None  # by which the updates were divided between host and device
    has_observed: bool = False  # whether `rates` follow what was measured in the step before
    is_traced: bool = False  # whether the trace has it
    predicted_rate: float | None = None
    host_elements: int = 0
    device_elements: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    host: list[Mark] = field(default_factory=list)  # updates on the host
    device: list[Mark] = field(default_factory=list)  # updates on the device
    state_in: list[Mark] = field(default_factory=list)  # copies of optimizer state to the device
    state_out: list[Mark] = field(default_factory=list)  # and back to the host
    returned: list[Mark] = field(default_factory=list)  # copies of weights that the host has updated to the device

    def add_host_update(self, mark: Mark, elements: int) -> None:
        self.host.append(mark)
        self.host_elements += elements

    def add_return(self, mark: Mark, nbytes: int) -> None:
        self.returned.append(mark)
        self.bytes_in += nbytes

    def add_device_update(self, update: DeviceUpdate, elements: int) -> None:
        self.device.append(update.used)
        self.state_in += update.state_in
        self.state_out.append(update.ended)
        self.bytes_in += update.bytes_in
        self.bytes_out += update.bytes_out
        self.device_elements += elements

    @property
    def is_over(self) -> bool:
        marks = (*self.host, *self.device, *self.state_in, *self.state_out, *self.returned)
        return all(mark.passed() for mark in marks)

    def stats(self) -> Stats:
        """The statistics; all marks have passed."""
        host, device, link_in, link_out = map(busy_seconds, (self.host, self.device, self.state_in, self.state_out))
        either = busy_seconds([*self.state_in, *self.state_out])
        device_span = whole_seconds([*self.state_in, *self.device, *self.state_out])
        host_span = whole_seconds(self.host)
        total = self.host_elements + self.device_elements
        # Eager updates wait for the backward again and again, so the rate is what the busiest lane could do.
        seconds = max(host, device, link_in, link_out) if self.eager else max(host_span, device_span)
        return Stats(
            step=self.step + 1,
            updates=self.updates,
            device_share=self.device_elements / total if total else 0.0,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            host_busy=host,
            device_busy=device,
            link_in_busy=busy_seconds([*self.state_in, *self.returned]),
            link_out_busy=link_out,
            duplex=(link_in + link_out - either) / either if either else 0.0,
            host_waited=max(0.0, device_span - host_span),
            device_waited=max(0.0, host_span - device_span),
            predicted_rate=self.predicted_rate,
            achieved_rate=total / seconds if seconds else 0.0,
        )
