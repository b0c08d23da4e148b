"""GPU code of other architectures becomes zeros, and nothing else of a library changes."""

import struct

import house  # noqa: F401  (puts the tools on the path)
import fatbin

PTX, SASS = 1, 2


def entry(kind, architecture, payload):
    head = struct.pack("<HHIQ", kind, 0, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture) + bytes(32)
    return head + payload


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(section):
    """An ELF file of two sections: their names, and the GPU code."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    start = 64 + len(names)
    table = start + len(section)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 1)
    places = [(0, 0, 0), (1, 64, len(names)), (11, start, len(section))]
    heads = b"".join(struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0") for name, at, size in places)
    return bytearray(bytes(head) + names + section + heads)


def test_own_code_stays_and_where_there_is_none_older_intermediate_code_does():
    first = container(entry(SASS, 80, b"a" * 8), entry(SASS, 90, b"b" * 16), entry(PTX, 80, b"c" * 8))
    second = container(entry(SASS, 80, b"d" * 8), entry(PTX, 80, b"e" * 8), entry(PTX, 100, b"f" * 8))
    data = library(first + bytes(8) + second)
    before = bytes(data)
    assert [[(e.kind, e.architecture, e.size) for e in entries] for entries in fatbin.containers(data)] == [
        [(SASS, 80, 8), (SASS, 90, 16), (PTX, 80, 8)],
        [(SASS, 80, 8), (PTX, 80, 8), (PTX, 100, 8)],
    ]
    assert fatbin.blank_others(data, 90) == 8 * 4
    expected = before
    for letter in b"acdf":
        expected = expected.replace(bytes([letter]) * 8, bytes(8))
    assert bytes(data) == expected


def test_a_library_without_gpu_code_is_left_alone():
    data = library(b"")
    before = bytes(data)
    assert fatbin.blank_others(data, 90) == 0 and data == before
