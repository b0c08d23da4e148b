"""GPU code inside a compiled library: one section of an ELF file holds containers, each with an entry for every architecture."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SECTION = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_PTX, _SASS = 1, 2


class Entry(NamedTuple):
    """Code of one architecture: ``data[start : start + size]`` of the file."""

    kind: int
    architecture: int
    start: int
    size: int


def containers(data: bytes | bytearray) -> Iterator[list[Entry]]:
    """The entries of each container of an ELF file."""
    at, end = _section(data)
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:  # padding
            at += 8
            continue
        entries, place = [], at + header
        at = place + size
        while place < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            entries.append(Entry(kind, architecture, place + header, size))
            place += header + size
        yield entries


def blank_others(data: bytearray, architecture: int) -> int:
    """Overwrite with zeros what a GPU of ``architecture`` (90 for sm_90) does not run; returns the bytes.

    A GPU takes its own machine code, and where there is none compiles the intermediate code of an older one: that stays there alone.
    Nothing moves, so that the file is as valid as before, and small once it is compressed.
    """
    blanked = 0
    for entries in containers(data):
        own = any(entry.kind == _SASS and entry.architecture == architecture for entry in entries)
        for entry in entries:
            if entry.kind == _PTX and not own and entry.architecture <= architecture:
                continue
            if not (entry.kind == _SASS and entry.architecture == architecture):
                data[entry.start : entry.start + entry.size] = bytes(entry.size)
                blanked += entry.size
    return blanked


def _section(data: bytes | bytearray) -> tuple[int, int]:
    """(start, end) of the section in the file; (0, 0) where there is none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, table + size * n) for n in range(count)]
    for name, _, _, _, start, length in heads:
        at = heads[names][4] + name
        if data[at : at + len(_SECTION) + 1] == _SECTION + b"\0":
            return start, start + length
    return 0, 0
