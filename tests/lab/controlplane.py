"""etcd and kube-apiserver: as a small control plane for tests, and as parts of the full lab."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.lab import build
from tests.lab.pki import Authority, write_kubeconfig
from tests.lab.proc import LabError, die_with_parent, run, tail, wait_for

ADMIN_TOKEN = "admin-token"
SERVICE_CIDR = "10.96.0.0/16"
SERVER_NAMES = (
    "IP:127.0.0.1",
    "IP:10.96.0.1",
    "DNS:localhost",
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
)


def etcd_argv(data: Path, client_url: str, peer_url: str) -> list[str]:
    """The command of an etcd that keeps nothing safe: a test cluster is not worth an fsync."""
    return [
        str(build.program("etcd")),
        f"--data-dir={data}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--unsafe-no-fsync",
    ]


def apiserver_argv(
    authority: Authority,
    *,
    etcd_url: str,
    port: int,
    address: str,
    names: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    """The command of a kube-apiserver with RBAC, whose admin has the token ADMIN_TOKEN."""
    directory = authority.directory
    server = authority.issue("apiserver", "kube-apiserver", names=[*SERVER_NAMES, *names])
    # Shown to kubelets (logs, exec) and to aggregated API servers and webhooks.
    client = authority.issue("apiserver-client", "kube-apiserver-client", ["system:masters"])
    tokens = directory / "tokens.csv"
    tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
    return [
        str(build.program("kube-apiserver")),
        f"--etcd-servers={etcd_url}",
        f"--secure-port={port}",
        f"--advertise-address={address}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        f"--token-auth-file={tokens}",
        f"--client-ca-file={authority.ca}",
        f"--tls-cert-file={server[0]}",
        f"--tls-private-key-file={server[1]}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={authority.sa}",
        f"--service-account-signing-key-file={authority.sa_key}",
        f"--kubelet-client-certificate={client[0]}",
        f"--kubelet-client-key={client[1]}",
        f"--requestheader-client-ca-file={authority.ca}",
        f"--proxy-client-cert-file={client[0]}",
        f"--proxy-client-key-file={client[1]}",
        "--allow-privileged=true",
        *extra,
    ]


def fetch(url: str, *, token: str | None = None, accept: str = "*/*") -> bytes | None:
    """What a URL answers with 200; None for anything else. Certificates are not looked at."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=2, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=2)
    try:
        headers = {"Accept": accept, **({"Authorization": f"Bearer {token}"} if token else {})}
        connection.request("GET", parts.path or "/", headers=headers)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def listens(address: str, port: int) -> bool:
    """Whether somebody takes TCP connections there."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def discovered(url: str) -> set[tuple[str, str]]:
    """Group and plural of every resource that clients of this API server can discover."""
    accept = "application/json;v=v2;g=apidiscovery.k8s.io;as=APIGroupDiscoveryList"
    groups = json.loads(fetch(f"{url}/apis", token=ADMIN_TOKEN, accept=accept) or "{}")
    return {
        (group["metadata"]["name"], resource["resource"])
        for group in groups.get("items", [])
        for version in group["versions"]
        for resource in version.get("resources", [])
    }


def crd_names(*sources: Path) -> set[tuple[str, str]]:
    """Group and plural of the CRDs in files or folders."""
    files = [
        file
        for source in sources
        for file in (sorted(source.iterdir()) if source.is_dir() else [source])
        if file.suffix in (".json", ".yaml", ".yml")
    ]
    return {
        (crd["spec"]["group"], crd["spec"]["names"]["plural"])
        for file in files
        for crd in yaml.load_all(file.read_text(), Loader=build.LOADER)
        if crd and crd["kind"] == "CustomResourceDefinition"
    }


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody uses at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _temporary() -> Path:
    """A new folder; those of processes that were killed are removed on the way."""
    prefix = "trainingjob-cluster-"
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = old.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


class ControlPlane:
    """A real etcd and kube-apiserver on this machine, without root and without nodes.

    No controller runs: a created object stays as it is, a namespace is never quite deleted, and
    the ServiceAccount admission is off so that pods can be created.

        with ControlPlane(kuberay=True) as cluster:
            cluster.kubectl("apply", "-f", "crds/")

    Both programs end with the thread that started them, however it ends.
    """

    token = ADMIN_TOKEN

    def __init__(
        self,
        *,
        kuberay: bool = False,
        audit_log: Path | None = None,
        apiserver_args: Sequence[str] = (),
        directory: Path | None = None,
    ):
        """`kuberay` installs the RayCluster CRD; `audit_log` is a file that gets every request."""
        self._kuberay = kuberay
        self._audit_log = audit_log
        self._extra = list(apiserver_args)
        self._keep = directory is not None
        self._chosen = directory
        self._etcd: subprocess.Popen[bytes] | None = None
        self._apiserver: subprocess.Popen[bytes] | None = None
        self._minted: dict[tuple[str, tuple[str, ...]], Path] = {}

    def start(self) -> ControlPlane:
        """Starts both programs and waits until the API server is ready."""
        self.directory = self._chosen or _temporary()
        atexit.register(self.stop)
        self.authority = Authority(self.directory / "pki").create()
        try:
            for attempt in range(3):
                try:
                    self._launch()
                    break
                except LabError as error:
                    # Between the choice of a port and its use somebody else may take it.
                    if "address already in use" not in str(error) or attempt == 2:
                        raise
                    self._end()
            if self._kuberay:
                self.install_crds(build.kuberay_crds() / "ray.io_rayclusters.json")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends both programs and removes their files."""
        atexit.unregister(self.stop)
        self._end()
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> ControlPlane:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig for any user in any groups, to try RBAC rules with.

        A service account is the user `system:serviceaccount:NAMESPACE:NAME`; its groups are added
        as the API server would.
        """
        if user.startswith("system:serviceaccount:"):
            namespace = user.split(":")[2]
            own = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
            groups = [*groups, *(group for group in own if group not in groups)]
        key = (user, tuple(groups))
        if key not in self._minted:
            number = len(self._minted)
            certificate = self.authority.issue(f"user-{number}", user, groups)
            path = self.directory / f"user-{number}.kubeconfig"
            self._minted[key] = write_kubeconfig(
                path, self.url, self.authority.ca, certificate=certificate
            )
        return self._minted[key]

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,
        kubeconfig: Path | None = None,
        timeout: float = 60,
    ) -> str:
        """Runs kubectl, as the admin unless another kubeconfig is given; returns its output."""
        config = kubeconfig or self.kubeconfig
        # Discovery is cached by host and port, and ports come back with other clusters.
        cache = self.directory / "kubectl-cache"
        flags = [f"--kubeconfig={config}", f"--cache-dir={cache}"]
        return run([build.program("kubectl"), *flags, *arguments], input=input, timeout=timeout)

    def install_crds(self, *paths: Path) -> None:
        """Creates the CRDs of files or folders and waits until they are served."""
        for path in paths:
            self.kubectl("create", "--validate=false", "-f", str(path), timeout=120)
        # Not `kubectl wait`: that fails on a CRD without conditions, and discovery comes later.
        names = crd_names(*paths)
        wait_for(lambda: names <= discovered(self.url), 60, "the CRDs are not served")

    def audit_events(self) -> list[dict[str, Any]]:
        """What the audit log holds so far."""
        if self._audit_log is None:
            raise LabError("this ControlPlane was made without an audit_log")
        if not self._audit_log.exists():
            return []
        lines = self._audit_log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def stop_apiserver(self) -> None:
        """Ends the API server alone, as an outage does; `start_apiserver` ends the outage."""
        self._terminate(self._apiserver)
        self._apiserver = None

    def start_apiserver(self) -> None:
        """Starts the API server on the address it had, with the objects it had."""
        if self._apiserver is None:
            self._apiserver = self._spawn("apiserver", self._apiserver_argv())
        self._await(self._apiserver, "apiserver", f"{self.url}/readyz")

    def _launch(self) -> None:
        client, peer, self.port = free_ports(3)
        self._etcd_url = f"http://127.0.0.1:{client}"
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca_file = self.authority.ca
        self.kubeconfig = write_kubeconfig(
            self.directory / "admin.kubeconfig", self.url, self.ca_file, token=self.token
        )
        data = self.directory / "etcd"
        self._etcd = self._spawn(
            "etcd", etcd_argv(data, self._etcd_url, f"http://127.0.0.1:{peer}")
        )
        # The API server waits for etcd by itself; started together they are ready sooner.
        self.start_apiserver()

    def _apiserver_argv(self) -> list[str]:
        extra = [
            "--bind-address=127.0.0.1",
            "--authorization-mode=RBAC",
            "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount",
        ]
        if self._audit_log is not None:
            policy = self.directory / "audit-policy.json"
            policy.write_text(
                json.dumps(
                    {
                        "apiVersion": "audit.k8s.io/v1",
                        "kind": "Policy",
                        "omitStages": ["RequestReceived"],
                        "rules": [{"level": "Metadata"}],
                    }
                )
            )
            extra += [f"--audit-policy-file={policy}", f"--audit-log-path={self._audit_log}"]
        return apiserver_argv(
            self.authority,
            etcd_url=self._etcd_url,
            port=self.port,
            address="127.0.0.1",
            extra=[*extra, *self._extra],
        )

    def _spawn(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _await(self, process: subprocess.Popen[bytes], name: str, url: str) -> None:
        log = self.directory / f"{name}.log"

        def ready() -> bool:
            for one, which in ((self._etcd, "etcd"), (process, name)):
                if one is not None and one.poll() is not None:
                    raise LabError(f"{which} ended{tail(self.directory / f'{which}.log')}")
            return fetch(url, token=self.token) is not None

        wait_for(ready, 60, f"{name} is not ready", log=log, interval=0.05)

    def _end(self) -> None:
        for process in (self._apiserver, self._etcd):
            self._terminate(process)
        self._apiserver = self._etcd = None
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory / "etcd", ignore_errors=True)

    @staticmethod
    def _terminate(process: subprocess.Popen[bytes] | None) -> None:
        # By force: an API server that ends politely takes its time, and nothing here is kept.
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(timeout=10)
