"""The one exception a user is meant to read: bad input or a set-up that cannot work."""


class UsageError(Exception):
    """Something the user can mend: a setting, a file, a folder. Printed as one line, exit code 2.

    The message names the setting or file, the value found and what would be right.
    """


class NonFiniteError(Exception):
    """The model produced NaN or infinite logits: nothing of that round is delivered.

    The message names the first layer whose output is not finite, and the round. ``from_scratch``:
    a run of the same tokens from an empty state is not finite either, so the weights or the
    element type are at fault and not the route's state. ``slot``: of the sequence that has them.
    """

    def __init__(self, message: str, from_scratch: bool, slot: int) -> None:
        super().__init__(message)
        self.from_scratch = from_scratch
        self.slot = slot
