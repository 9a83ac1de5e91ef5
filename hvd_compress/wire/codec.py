"""Whole messages: header and body."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_compress.errors import WireFormatError
from hvd_compress.wire.sections import Section

_MAGIC = b"HVDC"
_VERSION = 1
_HEADER = struct.Struct("<4sBBH8siIQ")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a message says."""

    DATA = 0
    LAYOUT_CHANGED = 1


@dataclass(frozen=True)
class Header:
    """The fixed part of a message; the fields are those of the format specification."""

    kind: Kind
    layout: bytes
    step: int
    body_bytes: int
    first_nonfinite: int = -1


def encode_message(
    header: Header, sections: Sequence[Section], arrays: Sequence[np.ndarray], length: int
) -> np.ndarray:
    """Return a message of ``length`` bytes as uint8.

    Raises:
        WireFormatError: an array does not fit its section, or the body the length.
    """
    message = np.zeros(length, np.uint8)
    if HEADER_BYTES + header.body_bytes > length:
        raise WireFormatError(f"expected a body of at most {length - HEADER_BYTES} bytes, got {header.body_bytes}")
    packed = _HEADER.pack(
        _MAGIC,
        _VERSION,
        header.kind,
        0,
        header.layout,
        header.first_nonfinite,
        header.step & 0xFFFFFFFF,
        header.body_bytes,
    )
    message[:HEADER_BYTES] = np.frombuffer(packed, np.uint8)
    start = HEADER_BYTES
    for section, array in zip(sections, arrays, strict=True):
        message[start : start + section.nbytes] = section.encode(array)
        start += section.nbytes
    return message


def decode_header(message: np.ndarray) -> Header:
    """Read and check the header of one message.

    Raises:
        WireFormatError: too short, wrong magic, version, kind or length.
    """
    if message.nbytes < HEADER_BYTES:
        raise WireFormatError(f"expected a message of at least {HEADER_BYTES} bytes, got {message.nbytes}")
    magic, version, kind, reserved, layout, first_nonfinite, step, body_bytes = _HEADER.unpack(
        message[:HEADER_BYTES].tobytes()
    )
    if magic != _MAGIC:
        raise WireFormatError(f"expected a message that starts with {_MAGIC!r}, got {magic!r}")
    if version != _VERSION:
        raise WireFormatError(f"expected format version {_VERSION}, got {version}; do all ranks have the same package?")
    if kind not in Kind.__members__.values() or reserved:
        raise WireFormatError(f"expected a message of kind 0 or 1, got kind {kind}, reserved {reserved}")
    if HEADER_BYTES + body_bytes > message.nbytes:
        raise WireFormatError(f"expected a body of {body_bytes} bytes, got {message.nbytes - HEADER_BYTES}: it is cut")
    if body_bytes != (message.nbytes - HEADER_BYTES if kind == Kind.DATA else 0):
        raise WireFormatError(f"expected {message.nbytes - HEADER_BYTES} body bytes, got a header of {body_bytes}")
    if first_nonfinite < -1:
        raise WireFormatError(f"expected the position of a tensor or -1, got {first_nonfinite}")
    return Header(Kind(kind), layout, step, body_bytes, first_nonfinite)


def decode_body(messages: np.ndarray, sections: Sequence[Section]) -> list[np.ndarray]:
    """Decode the bodies of all ranks' messages, uint8 of shape ``(ranks, length)``.

    Returns one array of shape ``(ranks, count)`` for every section.

    Raises:
        WireFormatError: the length is wrong or a section is malformed.
    """
    expected = HEADER_BYTES + sum(section.nbytes for section in sections)
    if messages.shape[1] != expected:
        raise WireFormatError(f"expected messages of {expected} bytes, got {messages.shape[1]}")
    arrays, start = [], HEADER_BYTES
    for section in sections:
        arrays.append(section.decode(messages[:, start : start + section.nbytes]))
        start += section.nbytes
    return arrays
