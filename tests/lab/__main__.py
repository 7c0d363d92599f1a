"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab import build
from tests.lab.cluster import Lab
from tests.lab.images import TARGETS
from tests.lab.proc import LabError


def pairs(text: str) -> dict[str, str]:
    """`k=v,k2=v2` as a dictionary."""
    found = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{pair!r} is not of the form key=value")
        found[key] = value
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m tests.lab",
        description="A real Kubernetes with several nodes on this machine, for the tests.",
    )
    top.add_argument("--kubeconfig", type=Path, help="use this cluster and start nothing")
    verbs = top.add_subparsers(dest="verb", required=True)

    up = verbs.add_parser("up", help="bring the lab up, or repair it")
    up.add_argument("--nodes", type=int, default=2)
    each = "of node1; again for node2, …; the last is for the rest too"
    up.add_argument("--gpus", type=int, action="append", default=[], help=f"fake GPUs {each}")
    up.add_argument("--labels", type=pairs, action="append", default=[], metavar="K=V,…",
                    help=f"labels {each}")  # fmt: skip

    verbs.add_parser("down", help="end everything and leave only the caches")
    verbs.add_parser("status", help="what runs")

    programs = verbs.add_parser("build", help="install and build what is missing, start nothing")
    programs.add_argument("--control-plane", action="store_true",
                          help="only what tests/apiserver needs")  # fmt: skip

    execute = verbs.add_parser("exec", help="run a command inside of the lab")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")

    kubectl = verbs.add_parser("kubectl", help="run kubectl", add_help=False)
    kubectl.add_argument("command", nargs=argparse.REMAINDER)

    image = verbs.add_parser("build-image", help="build targets of the Dockerfile")
    image.add_argument("target", nargs="+", choices=[*TARGETS])
    image.add_argument("--load", action="store_true", help="and give them to all nodes")

    load = verbs.add_parser("load-image", help="give an image to nodes")
    load.add_argument("name", nargs="+")
    load.add_argument("--nodes", default="", metavar="NAME,…", help="only to these")

    add = verbs.add_parser("add-node", help="add a node")
    add.add_argument("--name")
    add.add_argument("--gpus", type=int, default=0)
    add.add_argument("--labels", type=pairs, default={}, metavar="K=V,…")
    add.add_argument("--taint", action="append", default=[], metavar="K=V:EFFECT")

    kill = verbs.add_parser("kill-node", help="kill a node without notice, as a spot reclaim does")
    kill.add_argument("name")
    kill.add_argument("--delete", action="store_true", help="delete the Node object as well")
    kill.add_argument("--keep-network", action="store_true",
                      help="let its peers see their connections closed")  # fmt: skip

    for verb, text in (("start", "start"), ("stop", "stop"), ("restart", "restart")):
        part = verbs.add_parser(verb, help=f"{text} one program, named as in `status`")
        part.add_argument("part")

    volumes = verbs.add_parser("volumes", help="make unused volumes new and empty")
    volumes.add_argument("--count", type=int, default=20)
    return top


def main(arguments: Sequence[str]) -> int:
    """Runs one verb; returns the exit code."""
    words = parser().parse_args(arguments)
    lab = Lab(words.kubeconfig)
    match words.verb:
        case "up":
            lab.up(words.nodes, words.gpus, words.labels)
        case "down":
            lab.down()
        case "status":
            print(lab.status())
        case "build":
            build.ensure(build.CONTROL_PLANE if words.control_plane else build.EVERYTHING)
            build.kuberay_crds()
        case "exec" | "kubectl":
            command = words.command[1:] if words.command[:1] == ["--"] else words.command
            if words.verb == "kubectl":
                command = [str(build.program("kubectl")), *command]
            if not command:
                raise LabError("what is to run? `exec -- COMMAND…`")
            argv = lab.command(*command)
            os.execvpe(argv[0], argv, lab.env())
        case "build-image":
            for target in words.target:
                image = lab.build_image(target)
                if words.load:
                    lab.load_image(image.name)
        case "load-image":
            for name in words.name:
                lab.load_image(name, list(filter(None, words.nodes.split(","))))
        case "add-node":
            print(lab.add_node(words.name, gpus=words.gpus, labels=words.labels,
                               taints=words.taint))  # fmt: skip
        case "kill-node":
            lab.kill_node(words.name, delete=words.delete, cut_network=not words.keep_network)
        case "start":
            lab.start(words.part)
        case "stop":
            lab.stop(words.part)
        case "restart":
            lab.restart(words.part)
        case "volumes":
            lab.reset_volumes(words.count)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(1)
