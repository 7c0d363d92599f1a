"""Configuration of the operator: one YAML file, in Kubernetes from a ConfigMap."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from trainingjob.api.base import ApiModel
from trainingjob.api.job import explain
from trainingjob.planning.catalogue import Catalogue, NodePool


class LeaderElection(ApiModel):
    """Of several replicas, one acts."""

    enabled: bool = True
    """false: this process is the only one."""
    namespace: str = "default"
    """Namespace of the Lease."""
    name: str = "trainingjob-operator"
    """Name of the Lease."""


class Settings(ApiModel):
    """Configuration of the operator."""

    node_pools: list[NodePool] = []
    """The node pools that jobs can use."""
    namespaces: list[str] = []
    """Namespaces to watch. Empty: all."""
    watch_nodes: bool = True
    """Whether nodes may be read. Without it, pods on lost nodes are replaced only when Kubernetes
    itself gives them up, after minutes."""
    workers: Annotated[int, Field(ge=1, le=256)] = 16
    """Reconciles at a time."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Port of /livez, /readyz and /metrics."""
    token_key_file: str
    """File with the key that jobs' Ray tokens are derived from, at least 32 bytes."""
    leader_election: LeaderElection = LeaderElection()
    """Leader election."""
    log_level: str = "INFO"
    """Level of the log."""

    @property
    def catalogue(self) -> Catalogue:
        """The node pools as planning wants them."""
        return Catalogue(pools=self.node_pools)


class BadSettings(Exception):
    """The configuration cannot be used. The message has one line for each problem."""


def load(path: Path) -> Settings:
    """The settings in the file.

    Raises:
        BadSettings: it cannot be read or is not valid.
    """
    try:
        data: Any = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise BadSettings(f"{path}: {error}") from None
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        lines = [explain(e, data) for e in error.errors()]
        raise BadSettings("\n".join(f"{path}: {line}" for line in lines)) from None


def token_key(path: Path) -> bytes:
    """The key in the file.

    Raises:
        BadSettings: it is not there, or too short to be a secret.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise BadSettings(f"the key for Ray tokens cannot be read: {error}") from None
    if len(key) < 32:
        raise BadSettings(f"the key for Ray tokens in {path} has less than 32 bytes")
    return key
