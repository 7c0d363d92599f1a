"""The parts of the lab that need no cluster."""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.lab import LabError, proc, wait_for
from tests.lab.__main__ import pairs
from tests.lab.cluster import Lab
from tests.lab.images import Image, Layer, Store, chain_ids
from tests.lab.node import NodeSpec, parse_taint
from tests.lab.pki import Authority

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def test_chain_ids_are_those_of_the_image_spec():
    # sha256 of "<A> <B>", as written in the OCI image specification.
    assert chain_ids([]) == []
    assert chain_ids([A]) == [A]
    assert chain_ids([A, B]) == [
        A,
        "sha256:ccd722928bd92476ba1745586fed6e45a102504185ad88cd89e01ff116fd146c",
    ]
    assert chain_ids([A, B])[1] != chain_ids([B, A])[1]


def test_archive_holds_everything_but_the_layers():
    config = b'{"rootfs":{}}'
    layers = (Layer(A, A, 7, Path("/nowhere")),)
    with tarfile.open(fileobj=io.BytesIO(Image("x:1", "id", config, layers).archive())) as archive:
        files = {
            member.name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive
        }
    (top,) = json.loads(files["index.json"])["manifests"]
    assert top["annotations"] == {"io.containerd.image.name": "x:1"}
    manifest = json.loads(files["blobs/sha256/" + top["digest"].removeprefix("sha256:")])
    assert [layer["digest"] for layer in manifest["layers"]] == [A]
    name = "blobs/sha256/" + manifest["config"]["digest"].removeprefix("sha256:")
    assert files[name] == config
    assert len(files) == 4


def test_store_finds_images_by_short_names(monkeypatch):
    names = ["docker.io/library/trainingjob-trainer:0.1.0", "localhost/pause:3"]
    found = [Image(name, "id", b"", ()) for name in names]
    monkeypatch.setattr(Store, "images", lambda self: iter(found))
    store = Store()
    for name in ("trainingjob-trainer", "trainingjob-trainer:0.1.0", names[0]):
        assert store.find(name) is found[0]
    assert store.find("pause:3") is found[1]
    assert store.find("other") is None


def test_taints_and_labels_are_parsed():
    assert parse_taint("a/b=c:NoSchedule") == {"key": "a/b", "value": "c", "effect": "NoSchedule"}
    assert parse_taint("a:NoExecute") == {"key": "a", "value": "", "effect": "NoExecute"}
    with pytest.raises(LabError, match="key=value"):
        parse_taint("a=b")
    assert pairs("a=1,b=") == {"a": "1", "b": ""}
    with pytest.raises(argparse.ArgumentTypeError):
        pairs("a")


def test_default_nodes_take_the_last_value_given(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAININGJOB_LAB_DIR", str(tmp_path))
    lab = Lab()
    lab.run_dir.mkdir()
    assert [spec.labels["trainingjob.test/pool"] for spec in lab._specs(3, [], [])] == list("abb")
    assert [spec.gpus for spec in lab._specs(3, [4, 8], [{}])] == [4, 8, 8]
    assert lab._specs(1, [], [])[0] == NodeSpec("node1", 1, 0, {"trainingjob.test/pool": "a"})
    assert lab._reserve() == 4


def test_a_cluster_that_exists_is_left_alone(monkeypatch):
    monkeypatch.setenv("TRAININGJOB_TEST_KUBECONFIG", "/some/config")
    lab = Lab()
    assert lab.command("true") == ["true"]
    assert lab.env()["KUBECONFIG"] == "/some/config"
    for verb in (lab.down, lab.add_node, lambda: lab.kill_node("node1"), lab.reset_volumes):
        with pytest.raises(LabError, match="TRAININGJOB_TEST_KUBECONFIG"):
            verb()


def test_a_lab_that_is_down_says_how_to_bring_it_up(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAININGJOB_LAB_DIR", str(tmp_path))
    with pytest.raises(LabError, match=r"python -m tests\.lab up"):
        Lab().command("true")


def test_wait_for_names_what_it_waited_for_and_shows_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\nlast words\n")
    with pytest.raises(LabError, match=r"the thing: not within 0 s(.|\n)*last words"):
        wait_for(lambda: False, 0, "the thing", log=log)
    assert wait_for(lambda: 3, 0, "") == 3


def test_run_tells_what_failed():
    assert proc.run(["cat"], input="x") == "x"
    with pytest.raises(LabError, match=r"`sh -c .*` ended with 3: because"):
        proc.run(["sh", "-c", "echo because >&2; exit 3"])
    with pytest.raises(LabError, match="did not end within"):
        proc.run(["sleep", "5"], timeout=0.05)
    with pytest.raises(LabError, match="`no-such-program` is missing"):
        proc.run(["no-such-program"])


def test_a_part_is_found_by_its_mark_and_stopped(tmp_path):
    part = proc.Part("sleeper", ["sleep", "60"], f"test-{os.getpid()}:sleeper", tmp_path / "log")
    assert part.start()
    try:
        pid = wait_for(part.pid, 5, "the part")
        assert not part.start()
        assert list(proc.marked(f"test-{os.getpid()}:")) == [(pid, part.mark)]
        assert not proc.kill_marked(f"test-{os.getpid()}:other")
        assert part.pid() == pid
    finally:
        assert part.stop()
    assert part.pid() is None
    assert not part.stop()


def test_a_part_that_ends_is_reported_with_its_last_words(tmp_path):
    part = proc.Part(
        "liar",
        ["sh", "-c", "echo no such luck"],
        f"test-{os.getpid()}:liar",
        tmp_path / "log",
        ready=lambda: False,
    )
    part.start()
    with pytest.raises(LabError, match=r"liar ended(.|\n)*no such luck"):
        part.wait()


def test_a_program_dies_with_its_parent():
    script = (
        "import subprocess, sys; from tests.lab.proc import die_with_parent;"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent);"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()

    def gone() -> bool:
        try:
            return ") Z " in Path(f"/proc/{child}/stat").read_text()
        except FileNotFoundError:
            return True

    wait_for(gone, 5, "the end of the child")


def test_remove_tree_takes_folders_files_and_links(tmp_path):
    target = tmp_path / "kept"
    target.mkdir()
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/link").symlink_to(target)
    proc.remove_tree(tmp_path / "tree")
    proc.remove_tree(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_certificates_name_user_groups_and_servers(tmp_path):
    authority = Authority(tmp_path).create()
    certificate, _ = authority.issue("user", "a/b", ["one", "two"], names=["DNS:x"])
    text = proc.run(["openssl", "x509", "-in", certificate, "-noout", "-subject", "-text"])
    assert "O = one, O = two, CN = a/b" in text
    assert "DNS:x" in text
    before = certificate.read_bytes()
    authority.create().issue("user", "a/b", ["one", "two"], names=["DNS:x"])
    assert certificate.read_bytes() == before
    proc.run(["openssl", "verify", "-CAfile", authority.ca, certificate])
