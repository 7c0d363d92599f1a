"""A node: a network namespace with a containerd, a kubelet and a kube-proxy of its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.build import CNI_DIR, program
from tests.lab.controlplane import fetch
from tests.lab.images import PAUSE, Image
from tests.lab.pki import Authority, write_kubeconfig
from tests.lab.proc import (
    LabError,
    Part,
    in_netns,
    kill_all,
    make_cgroup,
    mounts,
    remove_cgroup,
    remove_tree,
    run,
)

HUB_ADDRESS = "10.85.0.1"
SERVER = f"https://{HUB_ADDRESS}:6443"
POD_CIDR = "10.86.0.0/16"


@dataclass(frozen=True)
class NodeSpec:
    """What a node is to be like."""

    name: str
    index: int
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[str] = ()


def parse_taint(text: str) -> dict[str, str]:
    """`key=value:Effect` or `key:Effect` as the API spells it."""
    match = re.fullmatch(r"([^=:]+)(?:=([^:]*))?:(NoSchedule|PreferNoSchedule|NoExecute)", text)
    if match is None:
        raise LabError(f"taint {text!r} is not of the form key=value:NoSchedule")
    return {"key": match[1], "value": match[2] or "", "effect": match[3]}


def proxy_config(path: Path, node: str, kubeconfig: Path) -> Path:
    """Writes the configuration of a kube-proxy."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": node,
        "oomScoreAdj": 0,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "conntrack": {"maxPerCore": 0, "min": 0},
        # A service answers as soon as its pod does: Ray's workers wait for that.
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
    }
    path.write_text(json.dumps(config))
    return path


class Node:
    """One node of the lab, in a folder of its own."""

    def __init__(self, run_dir: Path, lab_id: str, spec: NodeSpec):
        self.spec = spec
        self.name = spec.name
        self.dir = run_dir / "nodes" / spec.name
        self.netns = run_dir / "netns" / spec.name
        self.hub = run_dir / "netns" / "hub"
        self.pki = run_dir / "pki"
        self.link = f"n{spec.index}"
        self.address = f"10.85.0.{spec.index + 1}"
        self.pod_cidr = f"10.86.{spec.index}.0/24"
        self.cgroup = f"{lab_id}/{spec.name}"
        self.mark = f"{lab_id}:{spec.name}/"
        self.socket = self.dir / "containerd.sock"
        self.network = f"{lab_id}-{spec.name}"

    # --- life -------------------------------------------------------------------------------------

    def prepared(self) -> bool:
        """Whether `prepare` came to its end and the machine was not restarted since."""
        return (self.dir / "prepared").exists() and netns_exists(self.netns)

    def prepare(self) -> None:
        """Makes the network, the cgroup and the configuration of the node."""
        if self.prepared():
            return
        self.destroy()
        self.dir.mkdir(parents=True)
        self.save()  # first, so that what follows is removed when this is killed in between
        make_netns(self.netns)
        pair = f"link add {self.link} type veth peer name eth0 netns {self.netns}\n"
        ip(self.hub, pair + f"link set {self.link} master lab0 up\n")
        ip(self.hub, f"route replace {self.pod_cidr} via {self.address}\n")
        ip(
            self.netns,
            f"link set lo up\naddr add {self.address}/24 dev eth0\nlink set eth0 up\n"
            f"route add default via {HUB_ADDRESS}\n",
        )
        sysctl(self.netns, {"net/ipv4/ip_forward": "1"})
        make_cgroup(self.cgroup)
        self._write_config()
        (self.dir / "prepared").touch()

    def save(self) -> None:
        """Remembers what the node is to be like."""
        part = self.dir / "node.json.part"
        part.write_text(json.dumps(asdict(self.spec)))
        part.replace(self.dir / "node.json")

    def destroy(self, *, cut_network: bool = False) -> None:
        """Ends everything on the node at once, without a word to anybody, and removes the rest.

        With `cut_network` the cable goes first, as when a machine disappears: nobody is told by a
        closed connection.
        """
        if cut_network:
            with suppress(LabError):
                ip(self.hub, f"link set {self.link} down\n")
        kill_all(self.mark, self.cgroup)
        self._remove_strays()
        remove_tree(self.dir)
        remove_tree(self.netns)
        remove_cgroup(self.cgroup)
        if netns_exists(self.hub):
            for command in (f"link del {self.link}\n", f"route del {self.pod_cidr}\n"):
                with suppress(LabError):
                    ip(self.hub, command)

    def parts(self) -> list[Part]:
        """The programs of the node, in the order of their start."""
        path = {"PATH": f"{CNI_DIR}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        kubelet = [
            str(program("kubelet")),
            f"--config={self.dir}/kubelet.json",
            f"--kubeconfig={self.dir}/kubelet.kubeconfig",
            f"--root-dir={self.dir}/kubelet",
            f"--cert-dir={self.dir}/kubelet-certs",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]
        proxy = [str(program("kube-proxy")), f"--config={self.dir}/proxy.json"]
        containerd = [str(program("containerd")), f"--config={self.dir}/containerd.toml"]
        return [
            self._part("containerd", containerd, path, self._containerd_ready),
            self._part("kubelet", kubelet, path, self._kubelet_ready),
            self._part("proxy", proxy, path, None),
        ]

    def _part(self, name: str, argv: list[str], env: dict[str, str], ready: Any) -> Part:
        return Part(
            name=f"{self.name}/{name}",
            argv=argv,
            mark=f"{self.mark}{name}",
            log=self.dir / "log" / f"{name}.log",
            netns=self.netns,
            env=env,
            ready=ready,
        )

    def _containerd_ready(self) -> bool:
        try:
            self._ctr("version", timeout=10)
        except LabError:
            return False
        return True

    def _kubelet_ready(self) -> bool:
        return in_netns(self.netns, lambda: fetch("http://127.0.0.1:10248/healthz")) is not None

    def _remove_strays(self) -> None:
        """What containerd, CNI and the kubelet leave outside of the node's folder."""
        for file in self.dir.glob("containerd/state/io.containerd.runtime.v2.task/*/*/address"):
            Path(file.read_text().removeprefix("unix://")).unlink(missing_ok=True)
            for result in Path("/var/lib/cni/results").glob(f"*-{file.parent.name}-*"):
                result.unlink(missing_ok=True)
        for link in Path("/var/log/containers").glob("*.log"):
            if link.is_symlink() and str(link.readlink()).startswith(f"{self.dir}/"):
                link.unlink()

    # --- images -----------------------------------------------------------------------------------

    def images(self) -> dict[str, str]:
        """Name and digest of the images the node has."""
        rows = [line.split() for line in self._ctr("images", "ls").splitlines()[1:]]
        return {row[0]: row[2] for row in rows if not row[0].startswith("sha256:")}

    def load(self, images: Iterable[Image]) -> None:
        """Gives images to the node; layers it has already cost nothing."""
        kinds = self._snapshots()
        for image in images:
            parent = ""
            for layer in image.layers:
                if layer.chain_id not in kinds:
                    self._link_layer(layer.chain_id, parent, layer.path, kinds)
                    kinds[layer.chain_id] = "Committed"
                parent = layer.chain_id
            self._ctr("images", "import", "-", input=image.archive(), timeout=60)

    def _snapshots(self) -> dict[str, str]:
        rows = [line.split() for line in self._ctr("snapshots", "ls").splitlines()[1:]]
        return {row[0]: row[-1] for row in rows if row}

    def _link_layer(self, chain_id: str, parent: str, layer: Path, kinds: dict[str, str]) -> None:
        key = f"lab-{chain_id.removeprefix('sha256:')}"
        if key in kinds:  # of a load that was killed
            self._ctr("snapshots", "rm", key)
        self._ctr("snapshots", "prepare", key, *([parent] if parent else []))
        shown = self._ctr("snapshots", "mounts", "/mnt", key)
        # An overlay's upper folder; the lowest layer alone is a bind mount.
        match = re.search(r"upperdir=([^,\s]+)", shown) or re.search(r"bind (\S+)", shown)
        if match is None:
            raise LabError(f"{self.name}: no folder in {shown!r}")
        folder = Path(match[1])
        folder.rmdir()
        folder.symlink_to(layer)
        self._ctr("snapshots", "commit", chain_id, key)
        # containerd collects what no image names; the image is imported only after its layers.
        self._ctr("snapshots", "label", chain_id, "containerd.io/gc.root=lab")

    def _ctr(self, *arguments: str, input: bytes | None = None, timeout: float = 30) -> str:
        argv = ["ctr", f"--address={self.socket}", "--namespace=k8s.io", *arguments]
        return run(argv, input=input, timeout=timeout)

    # --- configuration ----------------------------------------------------------------------------

    def _write_config(self) -> None:
        (self.dir / "log").mkdir()
        authority = Authority(self.pki)
        user = f"system:node:{self.name}"
        kubelet = authority.issue(f"kubelet-{self.name}", user, ["system:nodes"])
        proxy = authority.issue("proxy", "system:kube-proxy")
        for name, certificate in (("kubelet", kubelet), ("proxy", proxy)):
            path = self.dir / f"{name}.kubeconfig"
            write_kubeconfig(path, SERVER, authority.ca, certificate=certificate)
        proxy_config(self.dir / "proxy.json", self.name, self.dir / "proxy.kubeconfig")
        (self.dir / "kubelet.json").write_text(json.dumps(self._kubelet_config(authority.ca)))
        cni = self.dir / "cni"
        cni.mkdir()
        (cni / "10-lab.conflist").write_text(json.dumps(self._cni_config()))
        (self.dir / "containerd.toml").write_text(self._containerd_config())

    def _kubelet_config(self, ca: Path) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failSwapOn": False,
            "failCgroupV1": False,
            "oomScoreAdj": 0,
            "clusterDNS": [HUB_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(ca)},
            },
            "authorization": {"mode": "Webhook"},
            "registerWithTaints": [parse_taint(taint) for taint in self.spec.taints],
            # The disk is everybody's: no node may evict pods or drop images because of it.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": f"{self.dir}/volume-plugins",
            "podLogsDir": f"{self.dir}/pod-logs",
        }

    def _cni_config(self) -> dict[str, Any]:
        # ptp, not bridge: every packet is routed, so services work without br_netfilter.
        ipam = {
            "type": "host-local",
            "dataDir": f"{self.dir}/ipam",
            "ranges": [[{"subnet": self.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        return {
            "cniVersion": "0.4.0",
            "name": self.network,
            "plugins": [
                {"type": "ptp", "ipMasq": False, "ipam": ipam},
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }

    def _containerd_config(self) -> str:
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc dies when it lowers a score.
        # Everything that defaults to a folder of the machine points into the node's own.
        cri = "io.containerd.grpc.v1.cri"
        return f"""version = 2
root = "{self.dir}/containerd/root"
state = "{self.dir}/containerd/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{self.socket}"
[plugins."{cri}"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."{cri}".cni]
    bin_dir = "{CNI_DIR}"
    conf_dir = "{self.dir}/cni"
  [plugins."{cri}".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
  [plugins."{cri}".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."{cri}".containerd.runtimes.runc.options]
    Root = "{self.dir}/runc"
"""


def remove_shared_leftovers() -> None:
    """Folders that kubelets and containerds of all labs share, once they are empty."""
    running = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            running.add((process / "exe").readlink().name)
    if "kubelet" not in running:
        Path("/var/lib/kubelet/device-plugins/kubelet.sock").unlink(missing_ok=True)
    for folder in (
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet",
        "/var/log/containers",
        "/var/lib/cni/results",
        "/var/lib/cni",
        "/run/containerd/s",
        "/run/containerd",
    ):
        with suppress(OSError):
            os.rmdir(folder)


def netns_exists(path: Path) -> bool:
    """Whether a network namespace is held at a path."""
    return path in [point for point, _ in mounts(["nsfs"])]


def make_netns(path: Path) -> None:
    """Makes a network namespace and holds it at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    run(["unshare", f"--net={path}", "true"])


def ip(netns: Path, commands: str) -> None:
    """Runs `ip` commands, one a line, in a network namespace."""
    run(["ip", "-batch", "-"], netns=netns, input=commands)


def sysctl(netns: Path, settings: Mapping[str, str]) -> None:
    """Sets kernel parameters of a network namespace; those this kernel lacks are passed over."""

    def write() -> None:
        for name, value in settings.items():
            with suppress(FileNotFoundError):
                Path("/proc/sys", name).write_text(value)

    in_netns(netns, write)


def stored_specs(run_dir: Path) -> list[NodeSpec]:
    """The nodes a run folder knows; a folder whose node was never finished is removed."""
    specs = []
    for folder in sorted((run_dir / "nodes").glob("*")):
        try:
            specs.append(NodeSpec(**json.loads((folder / "node.json").read_text())))
        except (OSError, ValueError, TypeError):
            remove_tree(folder)
    return sorted(specs, key=lambda spec: spec.index)
