"""A real kube-apiserver with the CRDs, shared by all tests of this tier."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.controlplane import ControlPlane
from tests.lab.proc import LabError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    plane = ControlPlane(kuberay=True)
    try:
        plane.start()
    except LabError as error:
        pytest.skip(f"no API server can be started here: {error}")
    try:
        plane.install_crds(ROOT / "crds" / "trainingjobs.yaml")
        yield plane
    finally:
        plane.stop()
