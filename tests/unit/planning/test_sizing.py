from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainingjob.api.spec import Workers
from trainingjob.planning.catalogue import Catalogue, NodePool
from trainingjob.planning.sizing import DoesNotFit, size

GI = 2**30


def pool(gpus: int = 8, kind: str = "h100", **fields: Any) -> NodePool:
    return NodePool.model_validate(
        {
            "name": fields.pop("name", f"{kind}-pool"),
            "gpuType": kind,
            "node": {"gpus": gpus, "cpu": "192", "memory": "1600Gi"},
            **fields,
        }
    )


def workers(**fields: Any) -> Workers:
    return Workers.model_validate(fields)


def shape(gpus: int, node: int, **fields: Any) -> tuple[int, int]:
    made = size(workers(gpus=gpus, **fields), Catalogue(pools=[pool(node)]), "Never")
    return made.pods, made.gpus_per_pod


@pytest.mark.parametrize(
    ("gpus", "node", "expected"),
    [
        (16, 8, (2, 8)),
        (8, 8, (1, 8)),
        (4, 8, (1, 4)),
        (1, 8, (1, 1)),
        (12, 8, (3, 4)),
        (7, 8, (1, 7)),
        (64, 8, (8, 8)),
        (3, 1, (3, 1)),
        (6, 4, (3, 2)),
    ],
)
def test_the_fewest_equal_pods_that_fit_whole_nodes(
    gpus: int, node: int, expected: tuple[int, int]
) -> None:
    assert shape(gpus, node) == expected


def test_replicas_decide_when_they_are_given() -> None:
    assert shape(4, 4, replicas=2) == (2, 2)


def test_nine_gpus_on_nodes_of_eight_are_refused_with_the_nearest_numbers() -> None:
    with pytest.raises(DoesNotFit, match="use 8 or 16 GPUs"):
        shape(9, 8)


def test_pods_larger_than_a_node_are_refused_with_valid_replicas() -> None:
    with pytest.raises(DoesNotFit, match="set workers.replicas to 4, 8, 16"):
        shape(16, 4, replicas=2)


def test_pods_get_their_share_of_the_node() -> None:
    made = size(workers(gpus=2), Catalogue(pools=[pool(8)]), "Never")
    assert made.cpu == 48
    assert made.memory == 400 * GI
    assert made.shared_memory == 100 * GI
    assert made.train_workers == 2
    assert made.cpus_per_train_worker == 24


def test_a_pod_with_fewer_cpus_than_gpus_shares_them() -> None:
    made = size(workers(gpus=4, cpu="900m"), Catalogue(pools=[pool(4)]), "Never")
    assert (made.ray_cpus, made.cpus_per_train_worker) == (1, Decimal("0.25"))
    assert made.cpus_per_train_worker * made.gpus_per_pod <= made.ray_cpus


def test_what_the_user_says_wins_over_the_share() -> None:
    made = size(
        workers(gpus=2, cpu="10", memory="64Gi", sharedMemory="8Gi"),
        Catalogue(pools=[pool(8)]),
        "Never",
    )
    assert (made.cpu, made.memory, made.shared_memory) == (Decimal(10), 64 * GI, 8 * GI)


def test_gpu_types_are_tried_in_order_of_preference() -> None:
    pools = Catalogue(pools=[pool(8, "a100"), pool(4, "h100")])
    made = size(workers(gpus=4, gpuTypes=["h100", "a100"]), pools, "Never")
    assert made.on_demand is not None
    assert made.on_demand.gpu_type == "h100"
    # Nine do not fill nodes of eight; three nodes of three do.
    made = size(
        workers(gpus=9, gpuTypes=["a100", "h100"]),
        Catalogue(pools=[pool(8, "a100"), pool(3, "h100")]),
        "Never",
    )
    assert made.on_demand is not None
    assert made.on_demand.gpu_type == "h100"


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DoesNotFit, match="no node pool has GPU type b200: .* knows h100"):
        shape(8, 8, gpuTypes=["b200"])


SPOT = pool(8, name="spot-pool", capacityType="spot")


def test_spot_policies_choose_the_pools() -> None:
    both = Catalogue(pools=[pool(8), SPOT])
    never = size(workers(gpus=8), both, "Never")
    assert (never.spot, never.on_demand) == (None, both.pools[0])
    require = size(workers(gpus=8), both, "Require")
    assert (require.spot, require.on_demand) == (SPOT, None)
    prefer = size(workers(gpus=8), both, "Prefer")
    assert (prefer.spot, prefer.on_demand) == (SPOT, both.pools[0])


def test_prefer_without_a_spot_pool_runs_on_demand() -> None:
    made = size(workers(gpus=8), Catalogue(pools=[pool(8)]), "Prefer")
    assert made.spot is None
    assert made.on_demand is not None


def test_require_without_a_spot_pool_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"spot.policy is Require and no spot pool"):
        size(workers(gpus=8), Catalogue(pools=[pool(8)]), "Require")


def test_never_with_spot_pools_only_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="only spot pools"):
        size(workers(gpus=8), Catalogue(pools=[SPOT]), "Never")


def test_cpu_training_needs_no_pool() -> None:
    made = size(workers(replicas=3), Catalogue(), "Never")
    assert (made.pods, made.gpus_per_pod, made.cpu, made.memory) == (3, 0, 1, 4 * GI)
    assert made.train_workers == 3


def test_a_cpu_worker_larger_than_any_node_is_refused() -> None:
    cpus = NodePool.model_validate({"name": "cpu", "node": {"cpu": "8", "memory": "32Gi"}})
    with pytest.raises(DoesNotFit, match="the largest, cpu, has 8 CPUs and 32Gi"):
        size(workers(replicas=1, cpu="16"), Catalogue(pools=[cpus]), "Never")


def test_shared_memory_is_part_of_memory() -> None:
    with pytest.raises(DoesNotFit, match="sharedMemory is part of workers.memory"):
        size(workers(replicas=1, memory="1Gi", sharedMemory="2Gi"), Catalogue(), "Never")


@given(gpus=st.integers(1, 256), node=st.integers(1, 16))
def test_every_size_is_exact_equal_and_fits_the_node(gpus: int, node: int) -> None:
    try:
        pods, per_pod = shape(gpus, node)
    except DoesNotFit as refusal:
        # What it recommends instead must fit.
        assume(" use " in str(refusal))
        numbers = str(refusal).split(" use ")[1].split(" GPUs")[0].split(" or ")
        for number in numbers:
            shape(int(number), node)
        return
    assert pods * per_pod == gpus
    assert per_pod <= node
    assert node % per_pod == 0 or pods == 1
