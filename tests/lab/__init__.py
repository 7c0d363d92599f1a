"""A real Kubernetes on this machine for the tests: `python -m tests.lab --help`."""

from tests.lab.controlplane import ControlPlane
from tests.lab.proc import LabError, wait_for

__all__ = ["ControlPlane", "LabError", "wait_for"]
