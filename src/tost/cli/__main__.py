"""``python -m tost.cli`` is ``tost``, for launchers that start modules."""

from __future__ import annotations

from tost.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
