"""A real Kubernetes on this machine for the tests: `python -m tests.lab --help`."""

from tests.lab.cluster import Lab
from tests.lab.controlplane import ControlPlane
from tests.lab.proc import LabError, wait_for

__all__ = ["ControlPlane", "Lab", "LabError", "wait_for"]
