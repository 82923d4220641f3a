"""The two exceptions that callers handle: bad input and temporary failures. Any other exception is a crash."""


class ConfigError(ValueError):
    """Bad input from the operator. The message names the field, file or artifact; the CLI exits with code 2."""


class Retryable(RuntimeError):
    """A temporary failure (a broken connection, an outage, a preemption), after which the stage is retried."""
