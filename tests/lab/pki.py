"""Certificates and kubeconfigs of a throwaway cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.lab.proc import LabError, require, run

_EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """A certificate authority in a folder; what exists already is not made again."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.ca = directory / "ca.crt"
        self.ca_key = directory / "ca.key"
        self.sa = directory / "sa.pub"
        self.sa_key = directory / "sa.key"

    def create(self) -> Authority:
        """Makes the authority and the key pair that signs service-account tokens."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.ca.exists():
            self._openssl("req", "-x509", *_EC, "-subj", "/CN=lab-ca", "-keyout", self.ca_key,
                          "-out", self.ca, "-days", "365")  # fmt: skip
        if not self.sa.exists():
            self._openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout",
                          "-out", self.sa_key)  # fmt: skip
            self._openssl("ec", "-in", self.sa_key, "-pubout", "-out", self.sa)
        return self

    def issue(
        self, name: str, user: str, groups: Sequence[str] = (), names: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """A certificate and its key for a user in groups, or for a server known by `names`."""
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        if certificate.exists():
            return certificate, key
        escaped = [part.replace("\\", "\\\\").replace("/", "\\/") for part in (*groups, user)]
        subject = "".join(f"/O={group}" for group in escaped[:-1]) + f"/CN={escaped[-1]}"
        extra = ["-addext", "subjectAltName=" + ",".join(names)] if names else []
        self._openssl("req", "-x509", "-CA", self.ca, "-CAkey", self.ca_key, *_EC, "-subj", subject,
                      "-addext", "basicConstraints=critical,CA:FALSE", *extra, "-days", "365",
                      "-keyout", key, "-out", certificate)  # fmt: skip
        return certificate, key

    @staticmethod
    def _openssl(command: str, *arguments: str | Path) -> None:
        # Written under another name first: a half-written file of a killed run must not count.
        program = require("openssl", "install the package `openssl` (3.0 or newer)")
        words = [str(word) for word in arguments]
        out = Path(words[words.index("-out") + 1])
        words[words.index("-out") + 1] = f"{out}.part"
        run([program, command, *words], timeout=20)
        Path(f"{out}.part").rename(out)


def write_kubeconfig(
    path: Path,
    server: str,
    ca: Path,
    *,
    token: str | None = None,
    certificate: tuple[Path, Path] | None = None,
) -> Path:
    """Writes a kubeconfig with one user, known by a token or by a certificate."""
    if token is not None:
        user: dict[str, str] = {"token": token}
    elif certificate is not None:
        user = {"client-certificate": str(certificate[0]), "client-key": str(certificate[1])}
    else:
        raise LabError("a kubeconfig needs a token or a certificate")
    cluster = {"server": server, "certificate-authority": str(ca)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "user"}}],
        "current-context": "lab",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")  # JSON is YAML too
    path.chmod(0o600)
    return path
