"""Runs where SpecForge is installed: loads a dataset with its own classes and hands back what they give.

Usage: load_specforge.py DATASET OUTPUT; OUTPUT becomes a safetensors file of `{file name}/{key}` per row and
`batch/{key}` of all rows collated; its metadata has the `paths` in SpecForge's order.
"""

from __future__ import annotations

import json
import sys

from safetensors.torch import save_file
from specforge.data.preprocessing import build_offline_eagle3_dataset, list_local_files
from specforge.data.utils import DataCollatorWithPadding
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader


def main(folder: str, output: str) -> None:
    paths = list_local_files(folder)
    dataset = build_offline_eagle3_dataset(folder, max_len=1 << 20)
    rows = [dataset[index] for index in range(len(dataset))]
    tensors = {}
    for path, row in zip(paths, rows, strict=True):
        name = path.rpartition("/")[2]
        tensors.update({f"{name}/{key}": value.clone() for key, value in row.items()})
    batch = DataCollatorWithPadding()(rows)
    tensors.update({f"batch/{key}": value.clone() for key, value in batch.items()})
    # Opens each file and asks for every key, as a run of it does that checks its features first.
    references = list(OfflineManifestReader(folder, validate_files=True).read())
    save_file(tensors, output, {"paths": json.dumps(paths), "references": str(len(references))})


main(*sys.argv[1:])
