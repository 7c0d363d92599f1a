"""`trainingjob validate` and `trainingjob render`: what the cluster would say and get, offline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ValidationError

from trainingjob.api.job import InvalidJob, TrainingJob, explain
from trainingjob.cli import manifests
from trainingjob.cli.errors import INVALID, CliError, invalid
from trainingjob.cli.text import clean
from trainingjob.planning import raycluster
from trainingjob.planning.catalogue import Catalogue, NodePool, NodeShape
from trainingjob.planning.sizing import size
from trainingjob.planning.unfit import Unfit

_GPUS, _CPU, _MEMORY = 8, "96", "1000Gi"
_REDACTED = "REDACTED"
_UID = "00000000-0000-0000-0000-000000000000"


def validate(files: Sequence[Path]) -> int:
    """Checks every TrainingJob in the files; returns the exit code."""
    code = 0
    for file in files:
        try:
            found = manifests.find(file)
        except CliError as error:
            typer.echo(f"error: {error}", err=True)
            code = INVALID
            continue
        for one in found:
            problems = _problems(one)
            if not problems:
                typer.echo(f'{file}: TrainingJob "{one.name}" is valid')
            for problem in problems:
                typer.echo(one.problem(problem))
                code = INVALID
    return code


def _problems(found: manifests.Found) -> list[str]:
    try:
        job = found.job()
    except InvalidJob as error:
        return error.problems
    # Nodes large enough for anything: what fits depends on the cluster, the rest does not.
    pools = assumed(job, gpus=max(_GPUS, job.spec.workers.gpus), cpu="1M", memory="1P")
    try:
        raycluster.check(job, size(job.spec.workers, pools, job.spec.spot.policy), pools)
    except Unfit as error:
        return [str(error)]
    return []


def assumed(
    job: TrainingJob, *, gpus: int = _GPUS, cpu: str = _CPU, memory: str = _MEMORY
) -> Catalogue:
    """Pools of nodes with the GPUs that the job names, where the real ones are not known."""
    spec = job.spec
    if not spec.workers.gpus:
        return Catalogue()
    shape = NodeShape(gpus=gpus, cpu=cpu, memory=memory)
    pools = []
    for kind in spec.workers.gpu_types or ["gpu"]:
        if spec.spot.policy != "Never":
            pools.append(
                NodePool(name=f"{kind}-spot", gpu_type=kind, capacity_type="spot", node=shape)
            )
        pools.append(NodePool(name=kind, gpu_type=kind, node=shape))
    return Catalogue(pools=pools)


def render(file: Path, name: str | None, pools: Path | None) -> int:
    """Prints what the operator would create for the job.

    Raises:
        CliError: the job is not valid or does not fit.
    """
    found, job = manifests.one(file, name)
    catalogue = _catalogue(pools) if pools else assumed(job)
    metadata = job.metadata.model_copy(update={"uid": job.metadata.uid or _UID})
    job = job.model_copy(update={"metadata": metadata})
    try:
        sizing = size(job.spec.workers, catalogue, job.spec.spot.policy)
        made = raycluster.manifests(
            raycluster.ClusterPlan(job, sizing, catalogue, generation=1, token=_REDACTED)
        )
    except Unfit as error:
        raise CliError(found.problem(str(error))) from None
    typer.echo("# Names and uid are examples: the API server gives each TrainingJob a uid.")
    if not pools and job.spec.workers.gpus:
        typer.echo(
            f"# Sized for assumed nodes of {_GPUS} GPUs, {_CPU} CPUs and {_MEMORY}: "
            "name yours with --pools."
        )
    typer.echo(_yaml(made), nl=False)
    return 0


class _Dumper(yaml.SafeDumper):
    """YAML in which text of several lines reads as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _yaml(documents: list[dict[str, Any]]) -> str:
    made: str = yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=100
    )
    return made


def _catalogue(file: Path) -> Catalogue:
    """The pools in a file: the operator's configuration, Helm values or a list."""
    (data, *_) = manifests.load(file) or [None]
    listed = data.get("nodePools") if isinstance(data, dict) else data
    if not isinstance(listed, list) or not listed:
        raise invalid(f"{file}: holds no list nodePools")
    content: dict[str, Any] = {"pools": listed}
    try:
        return Catalogue.model_validate(content)
    except ValidationError as error:
        problems = [explain(e, content).replace("pools[", "nodePools[") for e in error.errors()]
        raise invalid("\n".join(f"{file}: {clean(p)}" for p in problems)) from None
