"""The one exception of devcluster."""


class Fault(Exception):
    """Something to tell the user, with the exit code it leads to."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code
