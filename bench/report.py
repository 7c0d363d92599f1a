"""Bars, medians and their report: what every benchmark ends with."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass
class Bar:
    """A figure that must not exceed its bar. `pairs` are the measurements it is made from."""

    name: str
    value: float
    bar: float
    unit: str = ""
    ours: Sequence[float] = ()
    theirs: Sequence[float] = ()

    @property
    def met(self) -> bool:
        return self.value <= self.bar


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float], bar: float) -> Bar:
    """The ratio of the medians."""
    value = statistics.median(ours) / statistics.median(theirs)
    return Bar(name, round(value, 4), bar, "x", list(ours), list(theirs))


def finish(benchmark: str, bars: Sequence[Bar]) -> int:
    """Prints each figure beside its bar, writes them as JSON, and returns the exit code."""
    for bar in bars:
        told = f"{bar.value:g}{bar.unit} (bar {bar.bar:g}{bar.unit})"
        if bar.ours and bar.theirs:
            told += (
                f"  ours {statistics.median(bar.ours):.2f} s, "
                f"theirs {statistics.median(bar.theirs):.2f} s, {len(bar.ours)} pairs"
            )
        print(f"{'met   ' if bar.met else 'MISSED'}  {bar.name}: {told}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}.json"
    path.write_text(json.dumps([{**asdict(b), "met": b.met} for b in bars], indent=1) + "\n")
    print(f"written to {path.relative_to(RESULTS.parents[1])}")
    return int(not all(bar.met for bar in bars))
