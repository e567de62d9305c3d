"""Run draftsmith and die at its n-th durable write, by SIGKILL: torn (part is there), before or after the rename.

python -m tests.killing MOMENT N VERB RECIPE [key=value ...]
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any


def arm(moment: str, n: int) -> None:
    """Make the n-th fsync or rename of this process its last act."""
    fsync, replace, count = os.fsync, Path.replace, [0]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fsync_or_die(descriptor: int) -> None:
        count[0] += moment == "torn"
        if moment == "torn" and count[0] == n:
            with contextlib.suppress(OSError):  # opened for reading only
                os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - 7))
            die()
        fsync(descriptor)

    def replace_or_die(self: Path, target: Any) -> Path:
        count[0] += moment in ("before", "after")
        if moment == "before" and count[0] == n:
            die()
        done = replace(self, target)
        if moment == "after" and count[0] == n:
            die()
        return done

    os.fsync = fsync_or_die
    Path.replace = replace_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    import draftsmith

    sys.exit(draftsmith.main(sys.argv[3:]))
