"""The lab: a control plane, nodes, CoreDNS and KubeRay on this machine, or a cluster that exists.

Everything runs in network namespaces of its own, around one bridge:

    hub   10.85.0.1   etcd, the Kubernetes control plane, CoreDNS, KubeRay, and the tests
    node  10.85.0.N   containerd, kubelet, kube-proxy, pods in 10.86.N.0/24
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.lab import build, proc
from tests.lab.build import program, say
from tests.lab.controlplane import (
    ADMIN_TOKEN,
    apiserver_argv,
    crd_names,
    discovered,
    etcd_argv,
    fetch,
    listens,
)
from tests.lab.images import Image, Store
from tests.lab.node import (
    HUB_ADDRESS,
    SERVER,
    Node,
    NodeSpec,
    ip,
    make_netns,
    netns_exists,
    proxy_config,
    remove_shared_leftovers,
    stored_specs,
    sysctl,
)
from tests.lab.pki import Authority, write_kubeconfig
from tests.lab.proc import (
    LabError,
    Part,
    enter_argv,
    enter_netns,
    in_netns,
    kill_all,
    lab_dir,
    lab_id,
    remove_cgroup,
    remove_tree,
    require,
    run,
    wait_for,
)

STORAGE_CLASS = "lab-shared"
DEFAULT_LABELS = ({"trainingjob.test/pool": "a"}, {"trainingjob.test/pool": "b"})
_ETCD = "http://127.0.0.1:2379"


class Lab:
    """The cluster that the tests run on.

    With `kubeconfig`, or TRAININGJOB_TEST_KUBECONFIG in the environment, it is a cluster that
    exists: nothing is started, and verbs that need the lab's own nodes say so.
    """

    def __init__(self, kubeconfig: Path | None = None):
        given = kubeconfig or os.environ.get("TRAININGJOB_TEST_KUBECONFIG")
        self.external = bool(given)
        self.dir = lab_dir()
        self.run_dir = self.dir / "run"
        self.kubeconfig = Path(given) if given else self.run_dir / "admin.kubeconfig"
        self.hub = self.run_dir / "netns" / "hub"
        self.id = lab_id()
        self.store = Store()

    # --- up and down ------------------------------------------------------------------------------

    def up(
        self,
        nodes: int = 2,
        gpus: Sequence[int] = (),
        labels: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Brings up the lab, or repairs what died of it; quick when all is well.

        `gpus` and `labels` are for node1, node2, …; the last one given is for the rest as well.
        Nodes that are up already get them too; one that was killed comes back.
        """
        if self.external:
            self.kubectl("get", "--raw=/readyz", timeout=20)
            return
        self._need_root()
        started = time.monotonic()
        with self._lock():
            with self._lock("images.lock"):
                build.ensure()
                crds = build.kuberay_crds()
                self.store.ensure_base()
            if not self._hub_prepared():
                self._down()
                self._prepare_hub()
            specs = self._specs(nodes, gpus, labels)
            with ThreadPoolExecutor(8) as pool:
                ready = [pool.submit(self._start_node_runtime, self._node(spec)) for spec in specs]
                self._start_control_plane()
                kuberay = pool.submit(self._start_kuberay, crds)
                for future in ready:
                    future.result()
                joined = [pool.submit(self._join, self._node(spec)) for spec in specs]
                self._ensure_volumes(20)
                for future in (*joined, kuberay):
                    future.result()
            self._wait_api(
                "/api/v1/namespaces/default/serviceaccounts/default", "the default service account"
            )
            for part in self.parts().values():
                part.check()
        say(f"up in {time.monotonic() - started:.1f} s: KUBECONFIG={self.kubeconfig}")

    def down(self) -> None:
        """Ends everything the lab started and removes what it left; the caches stay."""
        self._own("down")
        self._need_root()
        with self._lock(), self._lock("images.lock"):
            self._down()
            self.store.clean()

    def _down(self) -> None:
        for node in self._nodes():
            node.destroy()
        kill_all(f"{self.id}:hub/", self.id)
        remove_cgroup(self.id)
        remove_tree(self.run_dir)
        remove_shared_leftovers()

    # --- the control plane ------------------------------------------------------------------------

    def _hub_prepared(self) -> bool:
        return (self.run_dir / "prepared").exists() and netns_exists(self.hub)

    def _prepare_hub(self) -> None:
        for folder in ("log", "nodes", "volumes"):
            (self.run_dir / folder).mkdir(parents=True, exist_ok=True)
        make_netns(self.hub)
        # The default route leads nowhere; programs look for one to learn their own address.
        ip(
            self.hub,
            f"link set lo up\nlink add lab0 type bridge\naddr add {HUB_ADDRESS}/24 dev lab0\n"
            "link set lab0 up\nroute add default via 10.85.0.254\n",
        )
        sysctl(
            self.hub,
            {
                "net/ipv4/ip_forward": "1",
                "net/ipv4/conf/all/send_redirects": "0",
                "net/ipv4/conf/lab0/send_redirects": "0",
            },
        )
        iptables = require("iptables", "install the package `iptables`")
        for protocol in ("udp", "tcp"):
            # Whatever /etc/resolv.conf says, in here names are asked of CoreDNS.
            rule = ["-t", "nat", "-A", "OUTPUT", "-p", protocol, "--dport", "53", "-j", "DNAT"]
            run([iptables, *rule, f"--to-destination={HUB_ADDRESS}:53"], netns=self.hub)
        authority = Authority(self.run_dir / "pki").create()
        write_kubeconfig(self.kubeconfig, SERVER, authority.ca, token=ADMIN_TOKEN)
        for name, user in (
            ("controller-manager", "system:kube-controller-manager"),
            ("scheduler", "system:kube-scheduler"),
            ("proxy", "system:kube-proxy"),
        ):
            path = self.run_dir / f"{name}.kubeconfig"
            write_kubeconfig(path, SERVER, authority.ca, certificate=authority.issue(name, user))
        proxy_config(self.run_dir / "proxy.json", "node1", self.run_dir / "proxy.kubeconfig")
        (self.run_dir / "Corefile").write_text(
            f""".:53 {{
  bind {HUB_ADDRESS}
  errors
  rewrite name suffix .svc. .svc.cluster.local. answer auto
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {self.kubeconfig}
    ttl 5
  }}
  cache 5 {{
    denial 2048 1
  }}
}}
"""
        )
        (self.run_dir / "prepared").touch()

    def _control_plane(self) -> list[Part]:
        authority = Authority(self.run_dir / "pki")
        apiserver = apiserver_argv(
            authority,
            etcd_url=_ETCD,
            port=6443,
            address=HUB_ADDRESS,
            names=[f"IP:{HUB_ADDRESS}"],
            extra=[
                "--authorization-mode=Node,RBAC",
                "--endpoint-reconciler-type=master-count",
                "--kubelet-preferred-address-types=InternalIP",
            ],
        )
        return [
            self._part(
                "etcd",
                etcd_argv(self.run_dir / "etcd", _ETCD, "http://127.0.0.1:2380"),
                lambda: self._fetch(f"{_ETCD}/health"),
            ),
            self._part("apiserver", apiserver, lambda: self._fetch(f"{SERVER}/readyz")),
            self._part(
                "controller-manager",
                [
                    *self._with_kubeconfig("kube-controller-manager", "controller-manager"),
                    f"--root-ca-file={authority.ca}",
                    f"--service-account-private-key-file={authority.sa_key}",
                    f"--cluster-signing-cert-file={authority.ca}",
                    f"--cluster-signing-key-file={authority.ca_key}",
                    "--use-service-account-credentials",
                    f"--flex-volume-plugin-dir={self.run_dir}/volume-plugins",
                ],
                lambda: self._fetch("https://127.0.0.1:10257/healthz"),
            ),
            self._part(
                "scheduler",
                self._with_kubeconfig("kube-scheduler", "scheduler"),
                lambda: self._fetch("https://127.0.0.1:10259/healthz"),
            ),
            # For the hub itself: KubeRay, the API server's webhooks and the tests use services.
            self._part(
                "proxy", [str(program("kube-proxy")), f"--config={self.run_dir}/proxy.json"], None
            ),
            self._part(
                "coredns",
                [str(program("coredns")), f"-conf={self.run_dir}/Corefile"],
                lambda: in_netns(self.hub, lambda: listens(HUB_ADDRESS, 53)),
            ),
        ]

    def _kuberay(self) -> Part:
        return self._part(
            "kuberay",
            [
                str(program("kuberay-operator")),
                "--enable-leader-election=false",
                "--metrics-addr=:18080",
                "--health-probe-bind-address=:18082",
            ],
            lambda: self._fetch("http://127.0.0.1:18082/readyz"),
            {"KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": "kube-system"},
        )

    def _with_kubeconfig(self, name: str, config: str) -> list[str]:
        path = f"{self.run_dir}/{config}.kubeconfig"
        flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [
            str(program(name)), *(f"--{flag}={path}" for flag in flags), "--leader-elect=false"
        ]  # fmt: skip

    def _part(
        self,
        name: str,
        argv: Sequence[str],
        ready: Callable[[], bool] | None,
        env: Mapping[str, str] | None = None,
    ) -> Part:
        return Part(
            name=name,
            argv=argv,
            mark=f"{self.id}:hub/{name}",
            log=self.run_dir / "log" / f"{name}.log",
            netns=self.hub,
            env=env or {},
            ready=ready,
        )

    def _start_control_plane(self) -> None:
        etcd, apiserver, *rest = self._control_plane()
        for part in (etcd, apiserver):
            part.start()
        for part in (etcd, apiserver):
            part.wait()
        for part in rest:
            part.start()
        for part in rest:
            part.wait()

    def _start_kuberay(self, crds: Path) -> None:
        names = crd_names(crds)
        if not names <= self._discovered():
            self.kubectl("apply", "--server-side", "--validate=false", "-f", str(crds), timeout=120)
            wait_for(lambda: names <= self._discovered(), 60, "the KubeRay CRDs are not served")
        kuberay = self._kuberay()
        kuberay.start()
        kuberay.wait()

    def _discovered(self) -> set[tuple[str, str]]:
        return in_netns(self.hub, lambda: discovered(SERVER))

    # --- nodes ------------------------------------------------------------------------------------

    def _nodes(self) -> list[Node]:
        return [self._node(spec) for spec in stored_specs(self.run_dir)]

    def _node(self, spec: NodeSpec) -> Node:
        return Node(self.run_dir, self.id, spec)

    def _find_node(self, name: str) -> Node:
        nodes = {node.name: node for node in self._nodes()}
        if name not in nodes:
            raise LabError(f"no node {name!r}: there are {', '.join(nodes) or 'none'}")
        return nodes[name]

    def _specs(
        self, count: int, gpus: Sequence[int], labels: Sequence[Mapping[str, str]]
    ) -> list[NodeSpec]:
        """The nodes there are, and those missing of the `count` default ones."""
        specs = {spec.name: spec for spec in stored_specs(self.run_dir)}
        for index in range(1, count + 1):
            name = f"node{index}"
            default = DEFAULT_LABELS[min(index, len(DEFAULT_LABELS)) - 1]
            spec = specs.get(name, NodeSpec(name, index, labels=default))
            if gpus:
                spec = replace(spec, gpus=gpus[min(index, len(gpus)) - 1])
            if labels:
                spec = replace(spec, labels=labels[min(index, len(labels)) - 1])
            specs[name] = spec
        self._reserve(count)
        return list(specs.values())

    def _reserve(self, least: int = 0) -> int:
        """The next index of a node; none is given twice, as a new machine has a new name."""
        path = self.run_dir / "last-index"
        last = max(int(path.read_text()) if path.exists() else 0, least)
        path.write_text(str(last))
        return last + 1

    def _start_node_runtime(self, node: Node) -> None:
        """The part of a node's start that needs no API server."""
        node.prepare()
        node.save()
        containerd = node.parts()[0]
        restarted = containerd.start()
        containerd.wait()
        # A containerd that starts forgets images whose packed layers it does not hold.
        have = {} if restarted else node.images()
        node.load(image for image in self.store.images() if have.get(image.name) != image.digest)

    def _join(self, node: Node) -> None:
        """Starts the rest of a node and waits until it is Ready, with its labels and GPUs."""
        _, kubelet, proxy = node.parts()
        before = time.time()
        restarted = kubelet.start()
        proxy.start()
        kubelet.wait()

        def ready() -> bool:
            found = self._api(f"/api/v1/nodes/{node.name}")
            for condition in (found or {}).get("status", {}).get("conditions", []):
                if condition["type"] == "Ready" and condition["status"] == "True":
                    # Not the Ready of an earlier life of this node.
                    return not restarted or _epoch(condition["lastHeartbeatTime"]) >= int(before)
            return False

        wait_for(ready, 90, f"{node.name} is not Ready", log=kubelet.log)
        self._dress(node)

    def _dress(self, node: Node) -> None:
        found = self._api(f"/api/v1/nodes/{node.name}") or {}
        labels = found.get("metadata", {}).get("labels", {})
        if any(labels.get(key) != value for key, value in node.spec.labels.items()):
            # By the admin: a kubelet may not give itself labels such as a cloud's.
            words = [f"{key}={value}" for key, value in node.spec.labels.items()]
            self.kubectl("label", "--overwrite", f"node/{node.name}", *words)
        gpus = str(node.spec.gpus)
        if found.get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", "0") != gpus:
            patch = {kind: {"nvidia.com/gpu": gpus} for kind in ("capacity", "allocatable")}
            words = ["--subresource=status", "--type=merge", f"-p={json.dumps({'status': patch})}"]
            self.kubectl("patch", f"node/{node.name}", *words)

    def add_node(
        self,
        name: str | None = None,
        *,
        gpus: int = 0,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] = (),
    ) -> str:
        """Adds a node with every image there is, waits until it is Ready, returns its name."""
        self._own("add-node")
        with self._lock():
            self._need_up()
            index = self._reserve()
            name = name or f"node{index}"
            if name in {node.name for node in self._nodes()}:
                raise LabError(f"there is a node {name} already")
            node = self._node(NodeSpec(name, index, gpus, dict(labels or {}), list(taints)))
            self._reserve(index)
            self._start_node_runtime(node)
            self._join(node)
        return name

    def kill_node(self, name: str, *, delete: bool = False, cut_network: bool = True) -> None:
        """Kills a node at once and without notice, as a spot reclaim does.

        Its Node object stays unless `delete`, which is the cloud controller's part. Without
        `cut_network` its peers see their connections closed, as when only processes die.
        """
        self._own("kill-node")
        with self._lock():
            self._find_node(name).destroy(cut_network=cut_network)
        if delete:
            self.kubectl("delete", "node", name, "--wait=false")

    # --- single programs --------------------------------------------------------------------------

    def parts(self) -> dict[str, Part]:
        """Every program of the lab by its name."""
        parts = [*self._control_plane(), self._kuberay()]
        for node in self._nodes():
            parts += node.parts()
        return {part.name: part for part in parts}

    def start(self, name: str) -> None:
        """Starts one program that was stopped, and waits until it works again."""
        self._own("start")
        with self._lock():
            self._start(name)

    def stop(self, name: str) -> None:
        """Stops one program of the lab: the containers of a node run on without their kubelet."""
        self._own("stop")
        with self._lock():
            self._find_part(name).stop()

    def restart(self, name: str) -> None:
        """Stops and starts one program."""
        self._own("restart")
        with self._lock():
            self._find_part(name).stop()
            self._start(name)

    def _start(self, name: str) -> None:
        part = self._find_part(name)
        node, _, kind = name.partition("/")
        if kind == "containerd":
            self._start_node_runtime(self._find_node(node))
        elif kind == "kubelet":
            self._join(self._find_node(node))
        else:
            part.start()
            part.wait()

    def _find_part(self, name: str) -> Part:
        self._need_up()
        parts = self.parts()
        if name not in parts:
            raise LabError(f"no part {name!r}: there are {', '.join(parts)}")
        return parts[name]

    # --- images -----------------------------------------------------------------------------------

    def build_image(self, target: str) -> Image:
        """Builds `operator` or `trainer` of the Dockerfile unless it is up to date."""
        self._need_root()
        with self._lock("images.lock"):
            return self.store.build(target)[0]

    def load_image(self, name: str, nodes: Sequence[str] = ()) -> None:
        """Gives an image of the lab's store to nodes, all of them unless some are named."""
        self._own("load-image")
        self._need_up()
        image = self.store.find(name)
        if image is None:
            known = ", ".join(image.name for image in self.store.images())
            raise LabError(f"no image {name!r} (build-image makes them): there are {known}")
        with self._lock():
            for node in [self._find_node(name) for name in nodes] or self._nodes():
                node.load([image])

    # --- storage ----------------------------------------------------------------------------------

    def reset_volumes(self, count: int = 20) -> None:
        """Makes volumes that no claim uses new and empty, and sees that there are `count`."""
        self._own("volumes")
        with self._lock():
            self._need_up()
            for volume in self.kubectl_json("get", "pv")["items"]:
                if volume["spec"].get("storageClassName") != STORAGE_CLASS:
                    continue
                if volume["status"].get("phase") != "Bound":
                    self.kubectl("delete", "pv", volume["metadata"]["name"])
                    remove_tree(Path(volume["spec"]["hostPath"]["path"]))
            self._ensure_volumes(count)

    def volume_path(self, claim: str, namespace: str = "default") -> Path:
        """The folder behind a bound claim: what a pod wrote can be read there."""
        self._own("volumes")
        name = self.kubectl_json("get", "pvc", claim, f"-n={namespace}")["spec"].get("volumeName")
        if not name:
            raise LabError(f"the claim {namespace}/{claim} is not bound")
        return Path(self.kubectl_json("get", "pv", name)["spec"]["hostPath"]["path"])

    def _ensure_volumes(self, count: int) -> None:
        found = self._api("/api/v1/persistentvolumes") or {}
        have = {item["metadata"]["name"] for item in found.get("items", [])}
        names = [f"{STORAGE_CLASS}-{number:02}" for number in range(1, count + 1)]
        missing = [name for name in names if name not in have]
        if not missing:
            return
        items: list[dict[str, Any]] = [
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {
                    "name": STORAGE_CLASS,
                    "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                },
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "Immediate",
                "reclaimPolicy": "Retain",
            }
        ]
        for name in missing:
            path = self.run_dir / "volumes" / name
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
            items.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": name},
                    "spec": {
                        "capacity": {"storage": "10Gi"},
                        "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
                        "persistentVolumeReclaimPolicy": "Retain",
                        "storageClassName": STORAGE_CLASS,
                        # Every node is this machine: one folder is storage for all of them.
                        "hostPath": {"path": str(path), "type": "DirectoryOrCreate"},
                    },
                }
            )
        listing = {"apiVersion": "v1", "kind": "List", "items": items}
        words = ("apply", "--server-side", "--validate=false", "-f", "-")
        self.kubectl(*words, input=json.dumps(listing))

    # --- for tests --------------------------------------------------------------------------------

    def command(self, *argv: str) -> list[str]:
        """A command made to run inside of the lab; it wants the environment `env()`."""
        if self.external:
            return list(argv)
        self._need_up()
        return [*enter_argv(self.hub), *argv]

    def env(self) -> dict[str, str]:
        """The environment for commands that use the cluster."""
        path = os.pathsep.join([str(build.bin_dir()), os.environ.get("PATH", os.defpath)])
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def exec(self, *argv: str) -> int:
        """Runs a command inside of the lab, with KUBECONFIG set; returns its exit code."""
        return subprocess.run(self.command(*argv), env=self.env(), check=False).returncode

    def enter(self) -> None:
        """Moves this thread, and all it starts from now on, into the lab, with KUBECONFIG set.

        For the first line of a test session: its own clients then reach pods, services and names.
        """
        if not self.external:
            self._need_up()
            enter_netns(self.hub)
        os.environ.update(self.env())

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 60) -> str:
        """Runs kubectl against the cluster and returns its output."""
        argv = self.command(str(program("kubectl")), *arguments)
        return run(argv, input=input, timeout=timeout, env=self.env())

    def kubectl_json(self, *arguments: str, timeout: float = 60) -> Any:
        """Runs kubectl with `-o json` and returns what it answers."""
        return json.loads(self.kubectl(*arguments, "-o=json", timeout=timeout))

    def status(self) -> str:
        """What runs and what does not, for people."""
        if self.external:
            return self.kubectl("get", "nodes", "-o=wide")
        if not self._hub_prepared():
            return f"The lab in {self.dir} is down."
        lines = [f"{'PART':<24} {'PID':>8}  STATE"]
        for name, part in self.parts().items():
            pid = part.pid()
            state = "dead" if pid is None else "works"
            if pid is not None and part.ready is not None and not part.ready():
                state = "does not answer"
            lines.append(f"{name:<24} {pid or '-':>8}  {state}")
        with suppress(LabError):
            columns = "LABELS:.metadata.labels,GPUS:.status.allocatable.nvidia\\.com/gpu"
            lines += ["", self.kubectl("get", "nodes", "-o=wide", timeout=10).rstrip(), ""]
            lines.append(
                self.kubectl("get", "nodes", f"-o=custom-columns=NODE:.metadata.name,{columns}",
                             timeout=10).rstrip()
            )  # fmt: skip
        for node in self._nodes():
            with suppress(LabError):
                lines += ["", f"images of {node.name}:", *(f"  {name}" for name in node.images())]
        return "\n".join([*lines, "", f"KUBECONFIG={self.kubeconfig}"])

    # --- small things -----------------------------------------------------------------------------

    def _own(self, verb: str) -> None:
        if self.external:
            raise LabError(
                f"`{verb}` needs the lab's own nodes, but the cluster of {self.kubeconfig} is used:"
                " unset TRAININGJOB_TEST_KUBECONFIG to use the lab"
            )

    def _need_up(self) -> None:
        if not self._hub_prepared():
            raise LabError(f"the lab in {self.dir} is down: run `python -m tests.lab up`")

    @staticmethod
    def _need_root() -> None:
        if os.geteuid() != 0:
            raise LabError("the lab needs root: it makes namespaces, mounts and cgroups")
        for name in ("nsenter", "unshare", "umount"):
            require(name, "install the packages `util-linux` and `mount`")

    @contextmanager
    def _lock(self, name: str = "lock") -> Iterator[None]:
        """One command at a time changes the lab."""
        self.dir.mkdir(parents=True, exist_ok=True)
        with (self.dir / name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another command that changes the lab")
                wait_for(lambda: _try_lock(file.fileno()), 3600, f"the lock {self.dir / name}")
            if name == "lock":
                proc.work_mark = f"{self.id}:work/"
                kill_all(proc.work_mark)
            try:
                yield
            finally:
                if name == "lock":
                    proc.work_mark = None

    def _fetch(self, url: str) -> bool:
        return in_netns(self.hub, lambda: fetch(url, token=ADMIN_TOKEN)) is not None

    def _api(self, path: str) -> dict[str, Any] | None:
        """An object of the API server, without the cost of a kubectl."""
        body = in_netns(self.hub, lambda: fetch(SERVER + path, token=ADMIN_TOKEN))
        return json.loads(body) if body else None

    def _wait_api(self, path: str, what: str) -> None:
        wait_for(lambda: self._api(path), 60, f"{what} is not there")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _epoch(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
