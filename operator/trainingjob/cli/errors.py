"""How a command says that it cannot go on."""

INVALID, FAILURE, TIMED_OUT = 2, 1, 124
"""Exit codes: wrong usage or input; anything else that went wrong; out of time."""


class CliError(Exception):
    """Ends the command with `code`, and one line on standard error."""

    def __init__(self, message: str, code: int = FAILURE) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> CliError:
    """The user's input cannot be used."""
    return CliError(message, INVALID)
