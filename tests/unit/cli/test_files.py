"""Commands that read files only."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainingjob.cli import manifests
from trainingjob.cli.main import app

JOB = """\
apiVersion: raytraining.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  image: i
  rayVersion: "2.60.0"
  entrypoint: e
  workers: {{{workers}}}
"""
OTHER = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n"


def text(name: str = "x", workers: str = "gpus: 16") -> str:
    return JOB.format(name=name, workers=workers)


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def test_valid(file: Path) -> None:
    file.write_text(f"{OTHER}---\n{text('x')}---\n---\n{text('y')}")
    code, out, err = call("validate", file)
    assert (code, err) == (0, "")
    assert out == f'{file}: TrainingJob "x" is valid\n{file}: TrainingJob "y" is valid\n'


def test_invalid_in_the_words_of_the_api_server(file: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text(text())
    file.write_text(text(workers="gpus: -1, cpus: 3"))
    code, out, _ = call("validate", file, good)
    assert code == 2
    assert out.splitlines() == [
        f'{file}: TrainingJob "x": spec.workers.gpus: Invalid value: -1: '
        "spec.workers.gpus in body should be greater than or equal to 0",
        f'{file}: TrainingJob "x": unknown field "spec.workers.cpus"',
        f'{good}: TrainingJob "x" is valid',
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("config: {a: '" + "x" * 950_000 + "'}", "spec.config has 950"),
        ("worker: {podTemplate: {spec: {restartPolicy: Always}}}", "spec.restartPolicy"),
    ],
)
def test_what_only_the_operator_would_refuse(file: Path, more: str, said: str) -> None:
    file.write_text(f"{text()}  {more}\n")
    code, out, _ = call("validate", file)
    assert code == 2
    assert out.startswith(f'{file}: TrainingJob "x": ')
    assert said in out
    assert len(out.splitlines()) == 1


def test_sizes_that_depend_on_the_cluster_are_not_judged(file: Path) -> None:
    file.write_text(text(workers="gpus: 7, gpuTypes: [rare], cpu: 500, memory: 9Ti"))
    assert call("validate", file)[0] == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"# nothing\n---\n", "is empty"),
        (b"a: [", "is not YAML: line 1"),
        (b"a: b: c", "is not YAML: line 1"),
        (b"\x7fELF\x00\xff\xfe", "is not"),
        (b"\x00\x01", "is not YAML"),
        (b"- 1\n- 2\n", "is not a mapping"),
        (b"hello", "is not a mapping"),
        (OTHER.encode(), "holds no TrainingJob (Service)"),
        (b"kind: TrainingJob\napiVersion: kubeflow.org/v1\n", "holds no TrainingJob"),
        (b"a: &a [*a]\n", "is not YAML"),
        (b"? [a, b]\n: 1\n", "is not YAML"),
        (b"a: .nan\n", "is not YAML"),
        (b"!!python/object:os.system {}\n", "is not YAML"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "render", "run"])
def test_files_that_are_none(file: Path, content: bytes | None, said: str, command: str) -> None:
    if content is not None:
        file.write_bytes(content)
    code, out, err = call(command, file)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: {file}: ")
    assert said in err


def test_directory(tmp_path: Path) -> None:
    assert call("validate", tmp_path)[0] == 2


def test_yaml_as_the_kubernetes_tools_read_it(file: Path) -> None:
    file.write_text(
        "a: 3e-4\nb: 2024-01-01\nc: 1:30\nd: 010\ne: 1.5\nf: yes\n1: 2\ng: 0x1f\nh: '3e-4'\n"
        "i: 1_000\nj: -2\nk: 12e03x\n"
    )
    (read,) = manifests.load(file)
    assert read == {
        "a": 0.0003,
        "b": "2024-01-01",
        "c": "1:30",
        "d": 8,
        "e": 1.5,
        "f": True,
        "1": 2,
        "g": 31,
        "h": "3e-4",
        "i": 1000,
        "j": -2,
        "k": "12e03x",
    }


def test_items_of_a_list_and_a_missing_group(file: Path) -> None:
    inner = yaml.safe_load(text())
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [inner]}))
    assert call("validate", file)[0] == 0
    del inner["apiVersion"]
    file.write_text(yaml.safe_dump(inner))
    code, out, _ = call("validate", file)
    assert (code, out) == (2, f'{file}: TrainingJob "x": apiVersion: Required value\n')


def rendered(*arguments: object) -> list[dict[str, Any]]:
    code, out, err = call("render", *arguments)
    assert code == 0, err
    return list(yaml.safe_load_all(out))


def test_render(file: Path) -> None:
    file.write_text(text())
    code, out, _ = call("render", file)
    assert code == 0
    assert "# Sized for assumed nodes of 8 GPUs" in out
    secret, config, cluster = yaml.safe_load_all(out)
    assert [d["kind"] for d in (secret, config, cluster)] == ["Secret", "ConfigMap", "RayCluster"]
    assert secret["stringData"] == {"token": "REDACTED"}
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["replicas"] == 2


@pytest.mark.parametrize("key", [True, False])
def test_render_on_named_pools(file: Path, tmp_path: Path, key: bool) -> None:
    file.write_text(text())
    pools = tmp_path / "pools.yaml"
    listed = [
        {"name": "p", "gpuType": "l4", "node": {"gpus": 4, "cpu": "30", "memory": "100Gi"}},
    ]
    pools.write_text(yaml.safe_dump({"nodePools": listed, "port": 1} if key else listed))
    assert rendered(file, "--pools", pools)[2]["spec"]["workerGroupSpecs"][0]["replicas"] == 4


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("a: 1", 2, "holds no list nodePools"),
        ("nodePools: [{name: p, node: {cpu: 1}}]", 2, "nodePools[0].node.memory: Required value"),
        (
            "nodePools: [{name: p, gpuType: l4, node: {gpus: 0, cpu: 1, memory: 1Gi}}]",
            1,
            "does not fit",
        ),
    ],
)
def test_pools_that_do_not_do(
    file: Path, tmp_path: Path, content: str, code: int, said: str
) -> None:
    file.write_text(text())
    pools = tmp_path / "pools.yaml"
    pools.write_text(content)
    got, out, err = call("render", file, "--pools", pools)
    assert (got, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_one_of_several(file: Path) -> None:
    file.write_text(f"{text('x')}---\n{text('y')}")
    code, _, err = call("run", file)
    assert code == 2
    assert "holds several TrainingJobs (x, y): choose one with --name" in err
    code, _, err = call("render", file, "--name", "z")
    assert (code, err) == (2, f'error: {file}: holds no TrainingJob "z" but x, y\n')
    assert rendered(file, "--name", "y")[2]["metadata"]["name"].startswith("y-")


def test_run_refuses_what_needs_kubernetes(file: Path, tmp_path: Path) -> None:
    file.write_text(text() + "  envFrom: [{secretRef: {name: s}}]\n")
    code, _, err = call("run", file, "--runs-dir", tmp_path / "runs")
    assert code == 2
    assert "spec.envFrom" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "--none", "f"], ["wait", "x", "--for", "Never"], ["nonsense"]],
)
def test_usage_errors_are_one_line(arguments: list[str]) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_control_characters_do_not_reach_the_terminal(file: Path) -> None:
    file.write_text(text().replace("name: x", 'name: "\\e]0;x\\a"'))
    _, out, err = call("validate", file)
    assert "\x1b" not in out + err
    assert "\x07" not in out + err


def test_help_needs_none_of_the_large_libraries() -> None:
    heavy = ("ray", "torch", "kopf", "kubernetes", "aiohttp", "pydantic", "rich")
    program = (
        "import sys\n"
        "from trainingjob.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', [m for m in {heavy!r} if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert "loaded: []" in done.stdout
