"""The two errors that a caller can act on; anything else that is raised is a crash."""


class ConfigError(ValueError):
    """Bad input from the operator: one message that names the field, file or artifact. The CLI exits with code 2."""


class Retryable(RuntimeError):
    """A failure that may pass by itself (a broken connection, an outage, a preemption): the stage is tried again."""
