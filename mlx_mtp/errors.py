"""One class per kind of user mistake; its text is the one line that the user reads.

The command line prints the line to stderr and exits with `exit_code`. Anything else that reaches
the user as a traceback is a bug in mlx-mtp.
"""


class MtpError(Exception):
    """Something that the user can mend; the message says what, where and what to do."""

    exit_code = 1


class UsageError(MtpError):
    """An option or a prompt that cannot be honoured."""

    exit_code = 2


class ContextError(UsageError):
    """A prompt of `tokens` tokens, or more, where `limit` are the most."""

    def __init__(self, tokens: int, limit: int, *, counted: bool = True) -> None:
        super().__init__(
            f"the prompt has {'' if counted else 'more than '}{tokens} tokens; the model's "
            f"context, or max-kv, is {limit} with at least one to generate"
        )
        self.tokens, self.limit = tokens, limit


class LoadError(MtpError):
    """A checkpoint, a configuration or a hub answer that cannot be used."""

    exit_code = 3


class PairError(LoadError):
    """A target and a drafter that do not fit each other."""


class FitError(LoadError):
    """Not enough memory or disk for what was asked."""
