"""How an object store fails: the text is the reason alone, with no address and no credentials in it."""


class Failure(OSError):
    """It stays; another try would fail in the same way."""


class Passing(Failure):
    """It may pass: an overload, a cut connection, no answer in time."""


class Missing(Failure, FileNotFoundError):
    """There is no such object, bucket or upload."""


class Denied(Failure, PermissionError):
    """No credentials, or not enough rights."""


class Refused(Failure):
    """The condition of a request did not hold."""


class PastEnd(Failure):
    """The range begins behind the object's last byte."""


class Unconditional(Failure):
    """The store does not honour the condition of a conditional write."""
