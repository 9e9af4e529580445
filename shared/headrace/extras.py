"""Console scripts are in every install; one whose extra is missing says which to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import inside this block what the extra brings; without it, exit with code 2 and one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("headrace") and "." not in error.name:
            sys.stderr.write(f"headrace: this image carries no {error.name}; use the image of its service\n")
        else:
            sys.stderr.write(f"headrace: {error}; install it with: pip install 'headrace[{extra}]'\n")
        sys.exit(2)
