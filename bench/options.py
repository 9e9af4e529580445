"""Arguments that measurements share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def result_file(text: str) -> Path:
    """A file for the results, which can be written when they are there: they may come after many minutes.

    Raises:
        argparse.ArgumentTypeError: it cannot be written.
    """
    path = Path(text)
    there = path.is_file() or (path.parent.is_dir() and not path.exists())
    if not there or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name a file in a folder that is there")
    return path
