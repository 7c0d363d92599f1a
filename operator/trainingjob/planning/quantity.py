"""Kubernetes resource quantities as numbers."""

from decimal import Decimal

_FACTORS = {
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
}


def parse(text: str) -> Decimal:
    """The number that `text` stands for: cores, or bytes.

    Raises:
        ValueError: `text` is no quantity.
    """
    for suffix in sorted(_FACTORS, key=len, reverse=True):
        if text.endswith(suffix):
            return _number(text[: -len(suffix)], text) * _FACTORS[suffix]
    return _number(text, text)


def _number(digits: str, text: str) -> Decimal:
    try:
        return Decimal(digits)
    except ArithmeticError:
        raise ValueError(f"{text!r} is no resource quantity") from None


def cores(number: Decimal) -> str:
    """`number` cores as a quantity: "1500m", "2"."""
    millis = int(number * 1000)
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"


def mebibytes(number: Decimal) -> str:
    """`number` bytes as a quantity, rounded down to whole Mi."""
    return f"{int(number) // 2**20}Mi"
