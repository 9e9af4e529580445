"""An engine with the common patch: every finished prefill leaves a numbered folder. Run with headrace-engine's flags.

`req_{n}/` holds `states.safetensors` (`aux` [T, k*D], `final` [T, D]) and then `done`, whose text is T; n counts the
finished prefills of the server's life, whoever sent them. T are the rows of the prompt's last forward.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace_capture.config import CaptureConfig
from headrace_capture.forward import Forward
from headrace_engine.main import main
from headrace_engine.settings import EngineSettings

FOLDER_PREFIX, STATES, DONE = "req_", "states.safetensors", "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What /get_server_info tells: dumps so far, and how many of them lack rows."""

    dumps: int
    short: int


class Dumper:
    """Stands in the place of the capture core."""

    boot = "dumper"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dumps = self._short = 0
        folder.mkdir(parents=True, exist_ok=True)

    def forward(self, forward: Forward) -> dict[str, str]:
        """Dump the rows of each prompt that this forward ends; nothing is ever dropped."""
        begin = 0
        for piece in forward.pieces:
            end = begin + piece.rows
            if piece.prefix < piece.prompt_tokens <= piece.prefix + piece.rows:
                aux = torch.cat([states[begin:end] for states in forward.boundaries], dim=1)
                self._dump(aux, forward.final[begin:end].clone())
                self._short += piece.prefix > 0
            begin = end
        return {}

    def abort(self, rid: str) -> None:
        """Nothing is kept between forwards."""

    def counts(self) -> Counts:
        return Counts(dumps=self._dumps, short=self._short)

    def close(self, timeout: float) -> None:
        """Everything is written already."""

    def _dump(self, aux: torch.Tensor, final: torch.Tensor) -> None:
        folder = self._folder / f"{FOLDER_PREFIX}{self._dumps}"
        folder.mkdir()
        save_file({"aux": aux, "final": final}, folder / STATES)
        (folder / DONE).write_text(str(len(final)))
        self._dumps += 1


def open_dumper(_settings: EngineSettings, config: CaptureConfig, *_: object) -> Dumper:
    """A dumper into the dump folder."""
    return Dumper(config.dump_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ, open_dumper))
