"""The base of every configuration section: frozen, unknown keys refused, one canonical form.

The canonical JSON (sorted keys, no spaces, ASCII) is what content keys hash, so it must not depend on the platform,
the process or the order in which a file lists its keys.
"""


class ConfigError(ValueError):
    """Bad input from the operator: one message that names the field, file or artifact. The CLI exits with code 2."""


class Retryable(RuntimeError):
    """A failure that may pass by itself (a broken connection, an outage, a preemption): the stage is tried again."""
