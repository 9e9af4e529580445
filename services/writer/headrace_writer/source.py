"""Opens a judged dump as the source of a row, its checksum verified."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from headrace.dumpfolder import open_nofollow
from headrace.dumps import Dump
from headrace.errors import Unreadable
from headrace.messages import StoreJob
from headrace.verdicts import Reason, Refusal
from headrace_writer.destination import file_checksum
from headrace_writer.formats.base import RowSource, States


def open_source(path: Path, dump: Dump, job: StoreJob) -> RowSource | Refusal:
    """Map a dump and verify the checksum of its data section; the map lasts as long as the source is held.

    Returns:
        The source, or a `corrupt` refusal.

    Raises:
        Unreadable: the file is not the one that was judged.
        FileNotFoundError: it is gone.
    """
    with open_nofollow(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != dump.file_size:
            raise Unreadable(f"{path.name} has {size} bytes, and had {dump.file_size} a moment ago")
        data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))[dump.data_offset :]
    found = file_checksum(data)
    if found != dump.header.checksum:
        return Refusal(reason=Reason.CORRUPT, detail=f"the data is {found}, the dump says {dump.header.checksum}")
    aux, final = dump.header.tensors["aux"], dump.header.tensors["final"]
    return RowSource(
        request=job.id,
        sample=job.sample,
        header=dump.header,
        token_ids=dump.token_ids,
        mask=job.mask,
        aux=States(info=aux, buffer=data[aux.begin : aux.end]),
        final=States(info=final, buffer=data[final.begin : final.end]),
    )
