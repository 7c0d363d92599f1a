"""From apply to the entrypoint's first line, and from a crash to the next first line, beside
KubeRay's RayJob: same lab, same image, same resources, pairs one after the other.

Also the operator's memory with 1 000 idle jobs, on an API server without nodes.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.report import Bar, finish, ratio
from tests.cluster.conftest import install, job
from tests.lab.cluster import Lab
from tests.lab.controlplane import ControlPlane

ROOT = Path(__file__).parents[1]
PAIRS = int(os.environ.get("PAIRS", "5"))
IDLE_JOBS = 1000
SHARED = "/bench"
VOLUME = {
    "volumes": [{"name": "bench", "hostPath": {"path": "", "type": "Directory"}}],
    "mounts": [{"name": "bench", "mountPath": SHARED}],
}


def first_line(name: str, fail_first: bool) -> str:
    """An entrypoint whose first act is to note the time. When asked to, its first run crashes
    after the workers have come, as a training does, and notes that time as well."""
    note = f"date +%s.%N >> {SHARED}/{name}"
    if not fail_first:
        return note
    return f'{note}; [ "$(wc -l < {SHARED}/{name})" -ge 3 ] || {{ sleep 20; {note}; exit 1; }}'


def wait_lines(path: Path, count: int, timeout: float = 180) -> list[float]:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and len(lines := path.read_text().split()) >= count:
            return [float(line) for line in lines]
        time.sleep(0.02)
    raise TimeoutError(f"{path.name}: the entrypoint did not start {count} times")


def ray_job(name: str, entrypoint: str, mode: str, backoff: int) -> dict[str, Any]:
    """A RayJob on a cluster of the same shape as ours, everything else as KubeRay does it."""

    def pod(container: str, cpu: str, memory: str) -> dict[str, Any]:
        resources = {"cpu": cpu, "memory": memory}
        return {
            "spec": {
                "containers": [
                    {
                        "name": container,
                        "image": "trainingjob-trainer:0.1.0",
                        "imagePullPolicy": "IfNotPresent",
                        "resources": {"requests": resources, "limits": resources},
                        "volumeMounts": VOLUME["mounts"],
                    }
                ],
                "volumes": VOLUME["volumes"],
            }
        }

    spec = job()["spec"]
    head, workers = spec["head"], spec["workers"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"bash -c '{entrypoint}'",
            "submissionMode": mode,
            "backoffLimit": backoff,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": spec["rayVersion"],
                "headGroupSpec": {
                    "rayStartParams": {},
                    "template": pod("ray-head", head["cpu"], head["memory"]),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": workers["replicas"],
                        "minReplicas": workers["replicas"],
                        "maxReplicas": workers["replicas"],
                        "rayStartParams": {},
                        "template": pod("ray-worker", workers["cpu"], workers["memory"]),
                    }
                ],
            },
        },
    }


class Bench:
    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.count = 0

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}-{self.count}"

    def _run(self, manifest: dict[str, Any], lines: int) -> tuple[float, list[float]]:
        name = manifest["metadata"]["name"]
        kind = manifest["kind"].lower()
        began = time.time()
        self.lab.kubectl("apply", "-f", "-", input=yaml.safe_dump(manifest))
        found = wait_lines(self.folder / name, lines)
        self.lab.kubectl("delete", kind, name, "--timeout=120s", timeout=130)
        self._quiet()
        return began, found

    def _quiet(self) -> None:
        """The next measurement begins when nothing of the last one is left."""
        end = time.monotonic() + 120
        while self.lab.kubectl("get", "pods,raycluster,job", "-o=name").strip():
            if time.monotonic() > end:
                raise TimeoutError("pods of the last measurement do not go away")
            time.sleep(0.5)
        time.sleep(2)

    def ours(self, fail_first: bool = False) -> tuple[float, list[float]]:
        name = self._name("ours")
        volume = {"volumes": VOLUME["volumes"], "volumeMounts": VOLUME["mounts"]}
        manifest = job(name, entrypoint=first_line(name, fail_first), **volume)
        return self._run(manifest, 1 + 2 * fail_first)

    def theirs(self, mode: str, fail_first: bool = False) -> tuple[float, list[float]]:
        name = self._name("theirs")
        entrypoint = first_line(name, fail_first).replace('"', '\\"')
        manifest = ray_job(name, entrypoint, mode, int(fail_first))
        return self._run(manifest, 1 + 2 * fail_first)

    def start(self, mode: str) -> tuple[list[float], list[float]]:
        ours, theirs = [], []
        for pair in range(PAIRS):
            began, lines = self.ours()
            ours.append(lines[0] - began)
            began, lines = self.theirs(mode)
            theirs.append(lines[0] - began)
            print(f"  {mode} pair {pair + 1}: ours {ours[-1]:.2f} s, theirs {theirs[-1]:.2f} s")
        return ours, theirs

    def retry(self) -> tuple[list[float], list[float]]:
        ours, theirs = [], []
        for pair in range(PAIRS):
            _, lines = self.ours(fail_first=True)
            ours.append(lines[2] - lines[1])
            _, lines = self.theirs("HTTPMode", fail_first=True)
            theirs.append(lines[2] - lines[1])
            print(f"  retry pair {pair + 1}: ours {ours[-1]:.2f} s, theirs {theirs[-1]:.2f} s")
        return ours, theirs


def idle_memory() -> float:
    """The operator's RSS in MB with 1 000 suspended jobs, after it has looked at each."""
    with ControlPlane(kuberay=True) as plane, tempfile.TemporaryDirectory() as folder:
        plane.install_crds(ROOT / "crds" / "trainingjobs.yaml")
        jobs = [job(f"idle-{n}", suspend=True) for n in range(IDLE_JOBS)]
        plane.kubectl("create", "-f", "-", input=yaml.safe_dump_all(jobs), timeout=300)
        key, config = Path(folder) / "key", Path(folder) / "config.yaml"
        key.write_text("0" * 48)
        config.write_text(yaml.safe_dump({"tokenKeyFile": str(key), "port": 0}))
        environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        command = [sys.executable, "-m", "trainingjob.engine", "--config", str(config)]
        operator = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 300
            phases = "jsonpath={.items[*].status.phase}"
            while plane.kubectl("get", "tj", f"-o={phases}").split().count("Suspended") < IDLE_JOBS:
                if time.monotonic() > end:
                    raise TimeoutError("not every job was looked at")
                time.sleep(1)
            time.sleep(15)
            status = Path(f"/proc/{operator.pid}/status").read_text()
            return int(status.split("VmRSS:")[1].split()[0]) / 1000
        finally:
            operator.terminate()
            operator.wait(30)


def main() -> int:
    memory = idle_memory()
    print(f"  {IDLE_JOBS} idle jobs: {memory:.0f} MB")
    lab = Lab()
    lab.up()
    install(lab)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        VOLUME["volumes"][0]["hostPath"] = {"path": name, "type": "Directory"}
        bench = Bench(lab, folder)
        bench.ours()  # the first start reads the image from disk
        http = bench.start("HTTPMode")
        k8s = bench.start("K8sJobMode")
        retry = bench.retry()
    return finish(
        "start",
        [
            ratio("apply to first line, beside RayJob HTTPMode", *http, 0.45),
            ratio("apply to first line, beside RayJob K8sJobMode", *k8s, 0.40),
            ratio("crash to next first line, beside RayJob backoffLimit", *retry, 0.15),
            Bar(f"memory with {IDLE_JOBS} idle jobs", round(memory), 120, " MB"),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
