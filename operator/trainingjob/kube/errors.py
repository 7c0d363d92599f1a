"""What the API server can answer beside what was asked for."""


class KubeError(Exception):
    """Any answer of the API server that is not a success. The message is the server's own."""

    def __init__(self, status: int, reason: str, message: str, request: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.request = status, reason, request

    def __str__(self) -> str:
        return f"{self.args[0]} ({self.request})"

    @property
    def message(self) -> str:
        """The server's sentence alone."""
        return str(self.args[0])


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409: somebody else wrote first, or the object exists."""


class Refused(KubeError):
    """403, 400 or 422: quota, policy, webhook, schema or missing rights. Retrying alone is
    useless, until somebody changes something."""


class Unavailable(KubeError):
    """The API server does not answer, or says that it cannot: nothing is known."""


def error_for(status: int, reason: str, message: str, request: str) -> KubeError:
    """The error class for an HTTP status."""
    if status == 404:
        return NotFound(status, reason, message, request)
    if status == 409:
        return Conflict(status, reason, message, request)
    if status in (400, 403, 405, 413, 415, 422):
        return Refused(status, reason, message, request)
    return Unavailable(status, reason, message, request)
