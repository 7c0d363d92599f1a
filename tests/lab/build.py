"""The programs a lab runs: from the machine, from Debian, or built from the Go module proxy."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.lab.proc import MARK, LabError, lab_dir, lab_id, require, run

KUBERNETES = "1.34.4"
KUBERAY = "1.6.0"
HELM = "3.22.0"
COREDNS = "1.15.0"

#: The fast parser where the machine's pyyaml has it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
_SERVER_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
)


@dataclass(frozen=True)
class Tool:
    """A Go program in a module of its own."""

    package: str
    version: str


TOOLS = {
    "kuberay-operator": Tool(_KUBERAY_MODULE, KUBERAY),
    "helm": Tool("helm.sh/helm/v3/cmd/helm", HELM),
    "coredns": Tool("github.com/coredns/coredns", COREDNS),
}

#: A program and the Debian package that holds it.
DEBIAN = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ip": "iproute2",
    "openssl": "openssl",
}
CNI_DIR = Path("/usr/lib/cni")

#: What a control plane alone needs.
CONTROL_PLANE = ("etcd", "openssl", "kube-apiserver", "kubectl")
EVERYTHING = (*DEBIAN, *_SERVER_PROGRAMS, "kubectl", *TOOLS)


def say(text: str) -> None:
    """A line of progress for whoever waits."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def build_mark() -> str:
    """The mark of everything that builds."""
    return f"{lab_id()}:build/"


def build_env() -> dict[str, str]:
    """The environment of everything that builds: if its parent is killed, it can be found."""
    return {**os.environ, MARK: build_mark()}


def bin_dir() -> Path:
    """Where built programs lie."""
    return lab_dir() / "bin"


def program(name: str) -> Path:
    """The path of a program that is there already, or a LabError with the remedy."""
    own = bin_dir() / name
    if own.exists():
        return own
    if name in DEBIAN:
        return Path(require(name, f"install the package `{DEBIAN[name]}`, {_REMEDY}"))
    if name == "kubectl":
        return Path(require(name, _REMEDY))
    raise LabError(f"`{own}` is missing: {_REMEDY}")


_REMEDY = "or run `python -m tests.lab build`, which does all of this"


def ensure(names: Iterable[str] = EVERYTHING) -> None:
    """Installs and builds whatever is missing of these programs."""
    names = list(names)
    ensure_debian(names)
    built = _built()
    servers = [name for name in _SERVER_PROGRAMS if name in names and built.get(name) != KUBERNETES]
    if "kubectl" in names and shutil.which("kubectl") is None and "kubectl" not in built:
        servers.append("kubectl")
    if servers:
        _build_kubernetes(servers)
    for name, tool in TOOLS.items():
        if name in names and built.get(name) != tool.version:
            _build_tool(name, tool)


def ensure_debian(names: Iterable[str]) -> None:
    """Installs the Debian packages of those programs that are missing."""
    wanted = {name: DEBIAN[name] for name in names if name in DEBIAN}
    missing = []
    for name, package in wanted.items():
        try:
            program(name)
        except LabError:
            missing.append(package)
    if "containerd" in wanted and not (CNI_DIR / "ptp").exists():
        missing.append("containernetworking-plugins")
    if not missing:
        return
    shown = " ".join(missing)
    if os.geteuid() != 0:
        raise LabError(f"packages are missing and only root can install them: {shown}")
    apt = require("apt-get", f"install by hand what these Debian packages hold: {shown}")
    say(f"installing {shown}")
    # RUNLEVEL=1: the packages' own services are not wanted, only their programs.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    install = [apt, "install", "-y", "--no-install-recommends", *missing]
    try:
        run(install, timeout=900, env=env)
    except LabError:
        run([apt, "update"], timeout=300, env=env)
        run(install, timeout=900, env=env)


def kuberay_crds() -> Path:
    """The folder of the KubeRay CRDs, fetched when it is not there yet."""
    target = lab_dir() / f"kuberay-crds-{KUBERAY}"
    if not target.exists():
        work = lab_dir() / "gomod" / "kuberay-crds"
        work.mkdir(parents=True, exist_ok=True)
        module = _download(f"{_KUBERAY_MODULE}@v{KUBERAY}", work)
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for crd in Path(module["Dir"], "config/crd/bases").glob("*.yaml"):
            # The descriptions are two thirds of 4 MB that every API server would have to digest.
            content = yaml.load(crd.read_text(), Loader=LOADER)
            (part / f"{crd.stem}.json").write_text(json.dumps(_without_descriptions(content)))
        part.rename(target)
    return target


def _without_descriptions(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _without_descriptions(value)
            for key, value in schema.items()
            if not (key == "description" and isinstance(value, str))
        }
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    return schema


def _go() -> str:
    os.environ["PATH"] += os.pathsep + "/usr/local/go/bin"
    return require("go", "install Go 1.25 or newer (https://go.dev/dl), it builds Kubernetes")


def run_go(arguments: Sequence[str], cwd: Path, timeout: float = 3600) -> str:
    env = {**build_env(), "CGO_ENABLED": "0"}
    return run(["nice", _go(), *arguments], cwd=cwd, timeout=timeout, env=env)


def _download(module: str, cwd: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(
        run_go(["mod", "download", "-json", module], cwd, timeout=600)
    )
    return found


def _build_kubernetes(names: Sequence[str]) -> None:
    say(f"building {', '.join(names)} {KUBERNETES} (about 6 minutes, once)")
    work = lab_dir() / "gomod" / "kubernetes"
    work.mkdir(parents=True, exist_ok=True)
    (work / "go.mod").write_text("module lab\n\ngo 1.24.0\n")
    upstream = Path(_download(f"k8s.io/kubernetes@v{KUBERNETES}", work)["GoMod"]).read_text()
    # Its go.mod replaces the staging modules by paths that its zip does not hold: point each at
    # the published module.
    staging = re.findall(r"^\s+(k8s\.io/[a-z0-9-]+) => \./staging", upstream, re.MULTILINE)
    minor = KUBERNETES.removeprefix("1.")
    go_line = next(line for line in upstream.splitlines() if line.startswith("go "))
    (work / "go.mod").write_text(
        f"module lab\n\n{go_line}\n\nrequire k8s.io/kubernetes v{KUBERNETES}\n\nreplace (\n"
        + "".join(f"\t{module} => {module} v0.{minor}\n" for module in staging)
        + ")\n"
    )
    packages = [f"k8s.io/kubernetes/cmd/{name}" for name in names]
    (work / "tools.go").write_text(
        "//go:build tools\n\npackage lab\n\nimport (\n"
        + "".join(f'\t_ "{package}"\n' for package in packages)
        + ")\n"
    )
    run_go(["mod", "tidy"], work, timeout=900)
    version = "k8s.io/component-base/version"
    major, middle, _ = KUBERNETES.split(".")
    flags = (
        f"-s -w -X {version}.gitVersion=v{KUBERNETES}"
        f" -X {version}.gitMajor={major} -X {version}.gitMinor={middle}"
    )
    out = work / "out"
    out.mkdir(exist_ok=True)
    run_go(["build", "-trimpath", f"-ldflags={flags}", f"-o={out}/", *packages], work)
    for name in names:
        _install(out / name, name, KUBERNETES)


def _build_tool(name: str, tool: Tool) -> None:
    say(f"building {name} {tool.version} (1 to 2 minutes, once)")
    work = lab_dir() / "gomod" / name
    work.mkdir(parents=True, exist_ok=True)
    (work / "go.mod").write_text("module lab\n\ngo 1.25.0\n")
    run_go(["get", "-tool", f"{tool.package}@v{tool.version}"], work, timeout=900)
    run_go(["build", "-trimpath", "-ldflags=-s -w", f"-o={work}/out", tool.package], work)
    _install(work / "out", name, tool.version)


def _stamps() -> Path:
    return bin_dir() / "versions.json"


def _built() -> dict[str, str]:
    """Name and version of the programs that were built to their end."""
    try:
        stamps: dict[str, str] = json.loads(_stamps().read_text())
    except (OSError, ValueError):
        return {}
    return {name: version for name, version in stamps.items() if (bin_dir() / name).exists()}


def _install(built: Path, name: str, version: str) -> None:
    bin_dir().mkdir(parents=True, exist_ok=True)
    built.chmod(0o755)
    built.replace(bin_dir() / name)
    part = _stamps().with_suffix(".part")
    part.write_text(json.dumps({**_built(), name: version}, indent=1))
    part.replace(_stamps())
