"""Text from elsewhere (logs, messages), made fit for a status field."""


def tail(text: str, limit: int) -> str:
    """The end of `text` in at most `limit` bytes of valid UTF-8, whole lines where possible,
    without control characters (which could rule a terminal)."""
    clean = "".join(c for c in text if c == "\n" or c == "\t" or (c.isprintable()))
    cut = clean.encode("utf-8", "ignore")[-limit:] if limit else b""
    kept = cut.decode("utf-8", "ignore")
    if len(kept) < len(clean) and "\n" in kept:
        kept = kept.split("\n", 1)[1]
    return kept
