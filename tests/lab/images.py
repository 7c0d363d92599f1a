"""Container images without a registry: made by buildah, handed to nodes without a copy.

buildah keeps each layer unpacked in its overlay store, in the very form a containerd snapshot has.
So a node gets an image by committing snapshots that are links into that store, and by importing
the manifest and the config alone. Nothing is packed, unpacked or copied: 7 GB take a second.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.build import build_env, build_mark, run_go, say
from tests.lab.proc import LabError, kill_all, lab_dir, remove_tree, require, run, unmount_below

REPO = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
PAUSE = "localhost/pause:3"

#: Target of the Dockerfile, and the files it is made from.
TARGETS = {
    "operator": ("requirements/operator.txt", "operator"),
    "trainer": ("requirements/trainer.txt", "trainer"),
}
_COMMON = ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE")

_OURS = "docker.io/library/trainingjob-"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# What the real image has of Python: also its headers, which torch.compile wants.
_BASE_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip,libpython3-dev"
_PAUSE_GO = """package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM)
	<-c
}
"""


#: Tag of the images: a kubelet would pull `latest` anew for each pod, and nothing can be pulled.
VERSION = "0.1.0"


def image_name(target: str) -> str:
    """The full name of the image of a Dockerfile target, as a kubelet asks for it."""
    return f"{_OURS}{target}:{VERSION}"


@dataclass(frozen=True)
class Layer:
    """An unpacked layer in buildah's store."""

    diff_id: str
    chain_id: str
    size: int
    path: Path


@dataclass(frozen=True)
class Image:
    """An image in buildah's store."""

    name: str
    id: str
    config: bytes
    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        """The digest that containerd shows for the image."""
        return f"sha256:{hashlib.sha256(self._manifest()).hexdigest()}"

    def _manifest(self) -> bytes:
        config = _descriptor("application/vnd.oci.image.config.v1+json", self.config)
        layers = [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": layer.diff_id,
                "size": layer.size,
            }
            for layer in self.layers
        ]
        return _json(
            {"schemaVersion": 2, "mediaType": _MANIFEST, "config": config, "layers": layers}
        )

    def archive(self) -> bytes:
        """An OCI archive of everything but the layers, for `ctr images import`."""
        manifest = self._manifest()
        names = {"io.containerd.image.name": self.name}
        top = {**_descriptor(_MANIFEST, manifest), "annotations": names}
        files = {
            "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
            "index.json": _json({"schemaVersion": 2, "manifests": [top]}),
            _blob(manifest): manifest,
            _blob(self.config): self.config,
        }
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for path, content in files.items():
                info = tarfile.TarInfo(path)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return out.getvalue()


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _blob(content: bytes) -> str:
    return f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"mediaType": kind, "digest": digest, "size": len(content)}


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The names that containerd gives to the snapshots of these layers."""
    chain: list[str] = []
    for diff_id in diff_ids:
        joined = f"{chain[-1]} {diff_id}".encode() if chain else b""
        chain.append(f"sha256:{hashlib.sha256(joined).hexdigest()}" if chain else diff_id)
    return chain


class Store:
    """buildah's store in the lab's folder, and what the lab builds in it."""

    def __init__(self) -> None:
        self.root = lab_dir() / "images"
        self._graph = self.root / "store"
        self._logs = self.root / "log"

    def images(self) -> Iterator[Image]:
        """Every image that has a name."""
        try:
            entries = json.loads((self._graph / "overlay-images/images.json").read_text())
            stored = json.loads((self._graph / "overlay-layers/layers.json").read_text())
        except FileNotFoundError:
            return
        by_id = {layer["id"]: layer for layer in stored}
        for entry in entries:
            if not entry.get("names"):
                continue
            data = base64.b64encode(f"sha256:{entry['id']}".encode()).decode()
            config = (self._graph / "overlay-images" / entry["id"] / f"={data}").read_bytes()
            chain: list[dict[str, Any]] = []
            layer = by_id.get(entry.get("layer", ""))
            while layer is not None:
                chain.insert(0, layer)
                layer = by_id.get(layer.get("parent", ""))
            diff_ids = json.loads(config)["rootfs"]["diff_ids"]
            if diff_ids != [layer["diff-digest"] for layer in chain]:
                raise LabError(f"image {entry['names']}: its layers are not those in {self._graph}")
            layers = tuple(
                Layer(diff_id, chain_id, layer["diff-size"], self._diff(layer["id"]))
                for diff_id, chain_id, layer in zip(
                    diff_ids, chain_ids(diff_ids), chain, strict=True
                )
            )
            for name in entry["names"]:
                yield Image(name, entry["id"], config, layers)

    def find(self, name: str) -> Image | None:
        """The image of that name: in full, or short as in a pod."""
        wanted = {name, f"{name}:{VERSION}", f"docker.io/library/{name}"}
        wanted |= {f"docker.io/library/{name}:{VERSION}", f"localhost/{name}"}
        return next((image for image in self.images() if image.name in wanted), None)

    def ensure_base(self) -> None:
        """Makes the pause image and the base image unless they are there."""
        kill_all(build_mark())  # whoever holds the lock builds; the rest was left by one killed
        have = {image.name for image in self.images()}
        for name, recipe, build in (
            (PAUSE, _PAUSE_GO, self._build_pause),
            (BASE, _BASE_PACKAGES, self._build_base),
        ):
            stamp = self.root / f"{hashlib.sha256(name.encode()).hexdigest()[:8]}.recipe"
            if name not in have or not stamp.exists() or stamp.read_text() != recipe:
                build()
                stamp.write_text(recipe)

    def build(self, target: str) -> tuple[Image, bool]:
        """Builds a target of the Dockerfile; False when it was up to date already."""
        if target not in TARGETS:
            raise LabError(f"no target {target!r}: it is one of {', '.join(TARGETS)}")
        self.ensure_base()
        name = image_name(target)
        base = self.find(BASE)
        digest = _digest(target) + (base.id if base else "")
        stamp = self.root / f"{target}.digest"
        image = self.find(name)
        if image and stamp.exists() and stamp.read_text() == f"{digest} {image.id}":
            return image, False
        say(f"building the image {name}")
        started = time.monotonic()
        options = ["--target", target, "--build-arg", f"BASE={BASE}"]
        if _CA_BUNDLE.exists():
            options += ["-v", f"{_CA_BUNDLE}:{_CA_BUNDLE}:ro"]
            options += ["--build-arg", f"PIP_CERT={_CA_BUNDLE}"]
        if index := os.environ.get("PIP_INDEX_URL"):
            options += ["--build-arg", f"PIP_INDEX_URL={index}"]
        self._bud(f"build-{target}", REPO, name, *options)
        image = self.find(name)
        if image is None:
            raise LabError(f"buildah made no image {name}")
        stamp.write_text(f"{digest} {image.id}")
        say(f"built {name} in {time.monotonic() - started:.0f} s")
        return image, True

    def clean(self) -> None:
        """Removes what a killed build left, and what no named image needs.

        Never while nodes run: their containers use the layers.
        """
        kill_all(build_mark())
        unmount_below(self.root)
        if not self._graph.exists():
            return
        names = {image.name for image in self.images()}
        for target in TARGETS:
            if image_name(target) in names:  # so those of other versions have had their time
                for name in names - {image_name(target)}:
                    if name.startswith(f"{_OURS}{target}:"):
                        self._buildah("rmi", name, timeout=60)
        self._buildah("rm", "--all", timeout=300)  # a build that failed leaves its container
        self._buildah("rmi", "--prune", timeout=300)

    def _diff(self, layer: str) -> Path:
        return self._graph / "overlay" / layer / "diff"

    def _build_pause(self) -> None:
        say("building the pause image")
        context = self._context("pause")
        (context / "main.go").write_text(_PAUSE_GO)
        (context / "go.mod").write_text("module pause\n\ngo 1.24\n")
        run_go(["build", "-trimpath", "-ldflags=-s -w", "-o=pause", "."], context, timeout=300)
        (context / "Dockerfile").write_text(
            'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n'
        )
        self._bud("build-pause", context, PAUSE)
        remove_tree(context)

    def _build_base(self) -> None:
        say(f"building {BASE} with debootstrap (about 2 minutes, once)")
        context = self._context("base")
        debootstrap = require("debootstrap", "install the package `debootstrap`")
        include = f"--include={_BASE_PACKAGES}"
        argv = [debootstrap, "--variant=minbase", include, "bookworm", "rootfs"]
        if mirror := os.environ.get("TRAININGJOB_LAB_DEBIAN_MIRROR"):
            argv.append(mirror)
        run(argv, cwd=context, timeout=1200, env=build_env(), log=self._logs / "debootstrap.log")
        shutil.rmtree(context / "rootfs/var/cache/apt", ignore_errors=True)
        run(["tar", "-C", "rootfs", "-cf", "base.tar", "."], cwd=context, timeout=300)
        (context / "Dockerfile").write_text(
            "FROM scratch\nADD base.tar /\n"
            "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
            'CMD ["/bin/bash"]\n'
        )
        self._bud("build-base", context, BASE)
        remove_tree(context)

    def _context(self, name: str) -> Path:
        context = self.root / "context" / name
        remove_tree(context)
        context.mkdir(parents=True)
        return context

    def _bud(self, log: str, context: Path, name: str, *options: str) -> None:
        # chroot: the only isolation that asks for no rights beyond root's own.
        argv = ["bud", "--isolation=chroot", "--layers", "--pull=false", "-t", name, *options]
        self._buildah(*argv, str(context), timeout=3600, log=self._logs / f"{log}.log")

    def _buildah(self, *arguments: str, timeout: float, log: Path | None = None) -> None:
        buildah = require("buildah", "install the package `buildah`")
        temporary = self.root / "tmp"  # buildah's own caches (RUN --mount=type=cache) lie here too
        temporary.mkdir(parents=True, exist_ok=True)
        run(
            [
                "nice",
                buildah,
                f"--root={self._graph}",
                f"--runroot={self.root}/runroot",
                "--storage-driver=overlay",
                *arguments,
            ],
            timeout=timeout,
            log=log,
            env={**build_env(), "TMPDIR": str(temporary)},
        )


def _digest(target: str) -> str:
    """A digest of everything that goes into the image of a target."""
    digest = hashlib.sha256()
    for source in (*_COMMON, *TARGETS[target]):
        path = REPO / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(REPO)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
