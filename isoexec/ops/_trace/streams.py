"""What is recorded of one stage, and how it leaves the recorder."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isoexec.ops._trace.context import Rows


@dataclass
class Stream:
    """Records of one stage in one case; what one pass adds is a chunk."""

    order: int
    ops: dict[str, None] = field(default_factory=dict)
    fields: dict[str, dict] = field(default_factory=dict)  # name -> kind, dtype, width in bytes
    chunks: list[tuple[Rows, dict[str, torch.Tensor]]] = field(default_factory=list)


def as_values(key: tuple, stream: Stream) -> dict:
    """A stream as JSON values and raw bytes."""
    kept = [(rows.sequence, rows.position) if rows.keep is None else (rows.sequence[rows.keep], rows.position[rows.keep])
            for rows, _ in stream.chunks]  # fmt: skip
    sequence, position = (torch.cat(part).to(torch.int32) for part in zip(*kept))
    names = [name for name in stream.fields if all(name in chunk for _, chunk in stream.chunks)]
    return dict(zip(("case", "layer", "stage", "occurrence"), key)) | {
        "order": stream.order,
        "ops": list(stream.ops),
        "sequence": _raw(sequence),
        "position": _raw(position),
        "fields": [
            {"name": name, **stream.fields[name], "data": _raw(torch.cat([chunk[name] for _, chunk in stream.chunks]))} for name in names
        ],
    }


def _raw(x: torch.Tensor) -> bytes:
    return x.cpu().contiguous().numpy().tobytes()


def width(value: torch.Tensor) -> int:
    """Bytes of a row."""
    return value[:1].numel() * value.element_size()
