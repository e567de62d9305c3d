"""The faults that end a command, by exit code. ValueError (exit 1) is the user's; these two are not."""


class GateRefused(Exception):
    """The gate said no, or what it needs is missing or changed. Exit code 2."""


class EnvironmentFault(Exception):
    """The machine, not the user: a dead server, a full disk, a missing program. Exit code 3."""
