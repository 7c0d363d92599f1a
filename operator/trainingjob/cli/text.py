"""Text for people: clean, short, aligned."""

from collections.abc import Sequence
from datetime import datetime


def clean(text: object) -> str:
    """One line of text from elsewhere without control characters: they could rule a terminal."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "" for c in str(text))


def clean_block(text: str) -> str:
    """As `clean`, with its lines and tabs."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def duration(seconds: float) -> str:
    """A duration as kubectl writes it: 45s, 1m52s, 3h5m, 2d4h."""
    whole = max(0, int(seconds))
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f"{rest}{below}" if rest else "")
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m" + (f"{whole % 60}s" if whole % 60 else "")


def age(since: str | None, now: datetime) -> str:
    """The time since an RFC 3339 moment."""
    if not since:
        return ""
    try:
        moment = datetime.fromisoformat(since.replace("Z", "+00:00"))
        return duration((now - moment).total_seconds())
    except (ValueError, TypeError):
        return "<unknown>"


def number(value: float) -> str:
    """A figure in as many digits as tell something."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 0.01 or not size:
        return f"{value:.2f}"
    return f"{value:.1e}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as kubectl aligns them: three spaces between."""
    cells = [list(header), *([clean(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ("   ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
