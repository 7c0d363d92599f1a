"""The node pools that jobs can use, declared in the operator's configuration."""

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from trainingjob.api.base import ApiModel, Quantity
from trainingjob.planning import quantity


class NodeShape(ApiModel):
    """What one node of a pool can give to pods."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a node."""
    cpu: Quantity
    """Allocatable CPUs, less what DaemonSets take."""
    memory: Quantity
    """Allocatable memory, less what DaemonSets take."""

    @property
    def cores(self) -> Decimal:
        """CPUs as a number."""
        return quantity.parse(self.cpu)

    @property
    def bytes(self) -> Decimal:
        """Memory in bytes."""
        return quantity.parse(self.memory)


class NodePool(ApiModel):
    """Equal nodes, told from others by a selector."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the pool."""
    gpu_type: str = ""
    """GPU type, as in `spec.workers.gpuTypes`. Empty: a pool without GPUs."""
    capacity_type: Literal["on-demand", "spot"] = "on-demand"
    """Whether the nodes can be taken away."""
    node: NodeShape
    """What one node can give."""
    resource: str = "nvidia.com/gpu"
    """Name of the GPU resource."""
    node_selector: dict[str, str] = {}
    """Labels of the pool's nodes."""
    tolerations: list[dict[str, Any]] = []
    """Tolerations that pods need there."""
    hourly_price: Annotated[float, Field(ge=0, strict=False)] | None = None
    """Price of a node per hour."""


class Catalogue(ApiModel):
    """All node pools."""

    pools: list[NodePool] = []
    """Node pools. Where several fit, the first one is used."""
