"""What context parallelism costs on more GPUs than were measured: a model, from measured pieces.

Compute is not modelled: the share of one GPU among n is run on one GPU and timed, for each n. Only
the exchange is, as ``hops * latency + bytes / bandwidth``::

    ring      n steps of equal compute; while each but the last runs, a rank sends its keys on
              time = (n - 1) * max(compute / n, exchange of one shard) + compute / n
    decode    the states of all ranks meet after the compute, nothing overlaps
              time = compute + exchange

How long the exchange of decode states takes depends on the library, so there are two bounds::

    ring      n - 1 hops one after the other, each over the slowest link
              (n - 1) * (latency + state / bandwidth)
    at once   every GPU sends its state to all others of its node in one step, as a switch allows
              latency + (n - 1) * state / bandwidth
              over m nodes, GPUs of equal place exchange first, then each node within itself
              network(latency + (m - 1) * state / bandwidth)
              + node(latency + (n - m) * state / bandwidth)

Assumptions: GPUs of one node reach each other at the measured rate all at once, as through a
switch; a ring over several nodes is as slow as its slowest hop in latency and in bandwidth; compute
and exchange do not slow each other down; merging n states takes as long as merging the two of the
measured exchange. The figures of a network between nodes are given, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidInputError


@dataclass(frozen=True)
class Link:
    """A way between two GPUs.

    Attributes:
        latency_us: Microseconds that an exchange of next to nothing takes.
        gbps: 10^9 bytes per second in one direction, while the other is used as well.
    """

    latency_us: float
    gbps: float

    def __post_init__(self) -> None:
        if self.latency_us < 0 or self.gbps <= 0:
            raise InvalidInputError.of("link", self, "latency_us >= 0 and gbps > 0")

    def time_us(self, size: float) -> float:
        """Microseconds of one hop.

        Args:
            size: Bytes.

        Returns:
            Latency and transfer together.
        """
        return self.latency_us + size / self.gbps * 1e-3

    @classmethod
    def fit(cls, small: tuple[float, float], large: tuple[float, float]) -> Link:
        """The link that explains two measured exchanges.

        Args:
            small: ``(bytes, microseconds)`` of one.
            large: The same of a larger one.

        Returns:
            The link on which both take what they took.

        Raises:
            InvalidInputError: The larger one is not larger, or did not take longer.
        """
        if large[0] <= small[0] or large[1] <= small[1]:
            raise InvalidInputError.of("large", large, f"more bytes and more time than {small}")
        gbps = (large[0] - small[0]) / (large[1] - small[1]) * 1e-3
        return cls(max(small[1] - small[0] / gbps * 1e-3, 0.0), gbps)


@dataclass(frozen=True)
class Pieces:
    """What was measured of one layer, and what is assumed of the network.

    Attributes:
        compute_us: Per number of GPUs, the compute of one of them.
        exchange_bytes: Bytes of all keys and values together (ring), or of one rank's state
            (decode).
        node: Between GPUs of one node.
        network: Between nodes.
        gpus_per_node: GPUs in a node.
    """

    compute_us: Mapping[int, float]
    exchange_bytes: float
    node: Link
    network: Link
    gpus_per_node: int = 8

    def link(self, gpus: int) -> Link:
        """The slowest hop of a ring.

        Args:
            gpus: How many GPUs it has.

        Returns:
            A link with the worst of latency and bandwidth among the hops.
        """
        if gpus <= self.gpus_per_node:
            return self.node
        latency = max(self.node.latency_us, self.network.latency_us)
        return Link(latency, min(self.node.gbps, self.network.gbps))

    def at_once_us(self, gpus: int) -> float:
        """Microseconds until every GPU has what each of them sent, if all send at the same time.

        Args:
            gpus: How many GPUs: one node, or whole nodes.

        Returns:
            One step within a node; over several, one between them and one within.

        Raises:
            InvalidInputError: The last node would not be full.
        """
        if gpus <= self.gpus_per_node:
            return self.node.time_us((gpus - 1) * self.exchange_bytes)
        nodes, rest = divmod(gpus, self.gpus_per_node)
        if rest:
            raise InvalidInputError.of("gpus", gpus, f"a multiple of {self.gpus_per_node}")
        between = self.network.time_us((nodes - 1) * self.exchange_bytes)
        return between + self.node.time_us((gpus - nodes) * self.exchange_bytes)

    def compute(self, gpus: int) -> float:
        """Microseconds of compute on each GPU.

        Args:
            gpus: Among how many.

        Returns:
            What was measured.

        Raises:
            InvalidInputError: It was not measured for so many.
        """
        if gpus not in self.compute_us:
            measured = ", ".join(map(str, sorted(self.compute_us)))
            raise InvalidInputError.of("gpus", gpus, f"{measured}, which were measured")
        return self.compute_us[gpus]


@dataclass(frozen=True)
class Cost:
    """What a layer takes on some number of GPUs.

    Attributes:
        gpus: How many.
        time_us: Microseconds.
        compute_us: Compute of one GPU in it.
        exposed_us: Exchange that no compute hides.
        efficiency: Time on one GPU over ``gpus * time_us``.
    """

    gpus: int
    time_us: float
    compute_us: float
    exposed_us: float
    efficiency: float


def ring_cost(pieces: Pieces, gpus: int) -> Cost:
    """Ring attention of one layer.

    Args:
        pieces: ``exchange_bytes`` are the keys and values of all ranks.
        gpus: How many GPUs.

    Returns:
        What it takes.
    """
    compute = pieces.compute(gpus)
    if gpus == 1:
        return Cost(1, compute, compute, 0.0, 1.0)
    step = compute / gpus
    hop = pieces.link(gpus).time_us(pieces.exchange_bytes / gpus)
    time = (gpus - 1) * max(step, hop) + step
    return Cost(gpus, time, compute, time - compute, pieces.compute(1) / (gpus * time))


def decode_cost(pieces: Pieces, gpus: int, exchange: str = "ring") -> Cost:
    """A decode step of one layer.

    Args:
        pieces: ``exchange_bytes`` are those of one rank's state.
        gpus: How many GPUs.
        exchange: ``"ring"``, the slowest way to bring all states together, or ``"at once"``, the
            fastest.

    Returns:
        What it takes.

    Raises:
        InvalidInputError: ``exchange`` is neither, or compute was not measured for so many.
    """
    compute = pieces.compute(gpus)
    if exchange not in ("ring", "at once"):
        raise InvalidInputError.of("exchange", repr(exchange), "'ring' or 'at once'")
    if gpus == 1:
        exposed = 0.0
    elif exchange == "ring":
        exposed = (gpus - 1) * pieces.link(gpus).time_us(pieces.exchange_bytes)
    else:
        exposed = pieces.at_once_us(gpus)
    time = compute + exposed
    return Cost(gpus, time, compute, exposed, pieces.compute(1) / (gpus * time))


__all__ = ["Cost", "Link", "Pieces", "decode_cost", "ring_cost"]
