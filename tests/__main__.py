"""Runs the test tiers: `python -m tests [unit] [local] [apiserver] [cluster]`.

A tier that this machine cannot run is skipped, and the last lines say why.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lab.cluster import Lab
from tests.lab.proc import LabError

ROOT = Path(__file__).parents[1]
TIERS = ("unit", "apiserver", "local", "cluster")
NO_TESTS = 5  # pytest's exit code


@dataclass
class Result:
    """How one tier ended."""

    tier: str
    counts: dict[str, int]
    seconds: float
    failed: bool = False
    skipped: str = ""

    def line(self) -> str:
        if self.skipped:
            return f"{self.tier:10} skipped: {self.skipped}"
        told = ", ".join(f"{n} {what}" for what, n in self.counts.items()) or "no test"
        return f"{self.tier:10} {'FAILED' if self.failed else 'ok'}: {told} in {self.seconds:.0f} s"


def pytest(tier: str, lab: Lab | None = None) -> Result:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--durations=8", f"tests/{tier}"]
    env = dict(os.environ)
    if lab:
        command, env = lab.command(*command), lab.env()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.search(r"\d+ (passed|failed|skipped|error)", line):
            last = line
    code = process.wait()
    counts = {
        what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    return Result(tier, counts, time.monotonic() - began, failed=code not in (0, NO_TESTS))


def cluster() -> Result:
    """The cluster tier, in a lab that is brought up for it and ended after it, unless it was up."""
    lab = Lab()
    was_up = answers(lab)
    try:
        lab.up()
        if not lab.external:
            for target in ("operator", "trainer"):  # inside of the lab there is no way out
                lab.build_image(target)
    except LabError as error:
        return Result("cluster", {}, 0, skipped=str(error).splitlines()[0])
    try:
        return pytest("cluster", lab)
    finally:
        if not was_up:
            lab.down()


def answers(lab: Lab) -> bool:
    try:
        lab.kubectl("get", "--raw=/readyz", timeout=10)
    except LabError:
        return False
    return True


def main(wanted: list[str]) -> int:
    unknown = set(wanted) - set(TIERS)
    if unknown:
        print(f"error: no tier {', '.join(sorted(unknown))}; there are {', '.join(TIERS)}")
        return 2
    results = []
    for tier in wanted or TIERS:
        print(f"\n=== tests/{tier}", flush=True)
        results.append(cluster() if tier == "cluster" else pytest(tier))
    print()
    for result in results:
        print(result.line())
    total = {
        what: sum(r.counts.get(what, 0) for r in results)
        for what in ("passed", "failed", "skipped")
    }
    print(", ".join(f"{n} {what}" for what, n in total.items()))
    return int(any(r.failed for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
