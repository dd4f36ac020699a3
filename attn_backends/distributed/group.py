"""The ranks that share a computation: a dimension of a device mesh, or a process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InvalidInputError


@dataclass(frozen=True)
class Group:
    """A process group as the code here needs it.

    Attributes:
        process_group: The group.
        rank: This process within it.
        size: Ranks in it.
    """

    process_group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh | dist.ProcessGroup) -> Group:
        """The group of a mesh with one dimension, or of a process group.

        Raises:
            InvalidInputError: torch has no distributed package, the mesh has several dimensions,
                or this process is not in the group.
        """
        if not dist.is_available():
            raise InvalidInputError.of("torch.distributed", "absent", "a torch built with it")
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                fix = "pass one dimension, for example mesh['cp']"
                raise InvalidInputError.of("mesh.ndim", mesh.ndim, "1", fix)
            group = mesh.get_group()
        elif isinstance(mesh, dist.ProcessGroup):
            group = mesh
        else:
            allowed = "a DeviceMesh of one dimension, or a ProcessGroup"
            raise InvalidInputError.of("mesh", type(mesh).__name__, allowed)
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidInputError.of("mesh", "a group without this rank", "one that holds it")
        return cls(group, rank, dist.get_world_size(group))

    def global_rank(self, rank: int) -> int:
        """The rank of the whole job that a rank of this group has."""
        return dist.get_global_rank(self.process_group, rank % self.size)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send slice r of ``x [size, ...]`` to rank r; slice r of the result came from rank r."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out.view(-1), x.view(-1), group=self.process_group)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``: a contiguous tensor of every rank, all of one shape."""
        out = x.new_empty((self.size, *x.shape))
        gather = _collective("all_gather_single", "all_gather_into_tensor")
        gather(out.view(-1), x.reshape(-1), group=self.process_group)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of slice ``rank`` of ``x [size, ...]``."""
        out = x.new_empty(x.shape[1:])
        scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        scatter(out.view(-1), x.reshape(-1), group=self.process_group)
        return out


def _collective(name: str, older: str) -> Callable[..., Any]:
    """A collective that torch has renamed."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


__all__ = ["Group"]
