from pathlib import Path

import pytest

from trainingjob.api.crd import render

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "copy", ["crds/trainingjobs.yaml", "charts/trainingjob-operator/files/trainingjobs.yaml"]
)
def test_the_crd_in_the_repository_is_the_generated_one(copy: str) -> None:
    assert (ROOT / copy).read_text() == render(), "run `make generate`"


def test_the_crd_fits_a_client_side_apply() -> None:
    # kubectl apply stores the object a second time in an annotation of at most 256 KiB.
    assert len(render()) < 100_000
