"""What several ranks exchange in a step, and how long that takes.

There are N ranks on each of M nodes. Each rank has gradients of G bytes and owns 1/(N M) of them. It sends every other
rank that rank's part, and gathers its own part from all of them; nothing is summed on the way. Of a node's gradients,

    G (N-1) / M      bytes stay in the node and cross its loopback, which all of its ranks share
    N G (M-1) / M    bytes leave the node over the network, and as many enter it

Updated weights of W bytes are in memory that the ranks of a node share: W (M-1) / M bytes enter a node, and as many
leave it. Residents (R bytes) are on every device: each rank receives all that it does not own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The devices and nodes of a job, and the rates at which its ranks exchange data."""

    devices: int = 1  # per node, with one rank each
    nodes: int = 1
    loopback: float = math.inf  # bytes per second, for all ranks of a node together
    network: float = math.inf  # bytes per second, into a node and at the same time out of it

    @property
    def size(self) -> int:
        return self.devices * self.nodes


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds that each exchange takes per step; None if there is no other rank to exchange with."""

    gathered: float | None = None  # gradients, within a node
    crossed: float | None = None  # gradients, between nodes
    shared: float = 0.0  # updated weights, within a node
    returned: float = 0.0  # updated weights, between nodes


def exchange_times(cluster: Cluster, gradients: float, weights: float, residents: float) -> ExchangeTimes:
    """The arguments are bytes: gradients in the dtype in which they cross, trained weights of units, and residents."""
    devices, nodes = cluster.devices, cluster.nodes
    within, across = (devices - 1) / nodes, (nodes - 1) / nodes
    return ExchangeTimes(
        gathered=gradients * within / cluster.loopback if devices > 1 else None,
        crossed=devices * gradients * across / cluster.network if nodes > 1 else None,
        shared=residents * within / cluster.loopback if devices > 1 else 0.0,
        returned=(weights + devices * residents) * across / cluster.network if nodes > 1 else 0.0,
    )
