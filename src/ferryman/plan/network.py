"""What several ranks exchange in a step, and how long that takes.

N ranks on each of M nodes; each has gradients of G bytes, of which it owns 1/(N M). A rank sends everyone their part
and gathers its own from everyone; nothing is added up on the way. So of a node's gradients

    G (N-1) / M      stay in the node, over its loopback, which all of its ranks have in common
    N G (M-1) / M    leave it over the network, and as many come in

Updated weights of W bytes lie in memory that the ranks of a node share: W (M-1) / M come in from other nodes, and as
many leave. Of what stays on each device, R bytes, every rank is sent what it does not own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, and how fast they reach each other."""

    devices: int = 1  # on each node, with a rank each
    nodes: int = 1
    loopback: float = math.inf  # bytes a second, of all ranks of a node together
    network: float = math.inf  # bytes a second, into a node and, at the same time, out of it

    @property
    def size(self) -> int:
        return self.devices * self.nodes


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of a step; None where there is nobody to exchange anything with."""

    gathered: float | None = None  # gradients, within a node
    crossed: float | None = None  # gradients, between nodes
    shared: float = 0.0  # updated weights, within a node
    returned: float = 0.0  # updated weights, between nodes


def exchange_times(cluster: Cluster, gradients: float, weights: float, residents: float) -> ExchangeTimes:
    """Bytes of what trains: gradients as they cross, weights of units, and of what stays on each device."""
    devices, nodes = cluster.devices, cluster.nodes
    within, across = (devices - 1) / nodes, (nodes - 1) / nodes
    return ExchangeTimes(
        gathered=gradients * within / cluster.loopback if devices > 1 else None,
        crossed=devices * gradients * across / cluster.network if nodes > 1 else None,
        shared=residents * within / cluster.loopback if devices > 1 else 0.0,
        returned=(weights + devices * residents) * across / cluster.network if nodes > 1 else 0.0,
    )
