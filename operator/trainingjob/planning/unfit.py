"""A job that cannot be carried out as it is written."""


class Unfit(ValueError):
    """What is wrong with the spec, found by the operator and not by the schema.

    `reason` is the reason of the Stalled condition; the message names cause and remedy.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
