"""Starts SGLang's server as `python -m sglang.launch_server` does, on a machine without a GPU."""

from __future__ import annotations

import os
import signal
import sys

import torchvision_schemas  # noqa: F401  (here, and not below: a spawned child runs the top level again)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    # Until the HTTP server takes the signal over: by default it would end this process and leave its children.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    load_plugins()
    arguments = prepare_server_args(sys.argv[1:])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
