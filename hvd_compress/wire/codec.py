"""Whole messages: header and body."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_compress.errors import WireFormatError
from hvd_compress.wire.sections import CountedSection, CountSection, Section

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
    message[:HEADER_BYTES] = _packed(header)
    start = HEADER_BYTES
    for section, array in zip(sections, arrays, strict=True):
        message[start : start + section.nbytes] = section.encode(array)
        start += section.nbytes
    return message


def frame(header: Header, body: np.ndarray) -> np.ndarray:
    """Return the message of a body that :func:`encode_body` has made."""
    return np.concatenate([_packed(header), body])


def _packed(header: Header) -> np.ndarray:
    fields = (header.layout, header.first_nonfinite, header.step & 0xFFFFFFFF, header.body_bytes)
    return np.frombuffer(_HEADER.pack(_MAGIC, _VERSION, header.kind, 0, *fields), np.uint8)


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


def split_messages(joined: np.ndarray) -> list[np.ndarray]:
    """Split messages that follow each other, by the lengths in their headers.

    Raises:
        WireFormatError: the last one is cut.
    """
    messages, start = [], 0
    while start < joined.nbytes:
        if joined.nbytes - start < HEADER_BYTES:
            raise WireFormatError(f"expected a header of {HEADER_BYTES} bytes, got {joined.nbytes - start}")
        *_, body_bytes = _HEADER.unpack(joined[start : start + HEADER_BYTES].tobytes())
        stop = start + HEADER_BYTES + body_bytes
        if stop > joined.nbytes:
            raise WireFormatError(f"expected a body of {body_bytes} bytes, got {joined.nbytes - start - HEADER_BYTES}")
        messages.append(joined[start:stop])
        start = stop
    return messages


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


def is_variable(sections: Sequence[Section]) -> bool:
    """Tell whether the length of the body depends on the data."""
    return any(isinstance(section, CountSection) for section in sections)


def encode_body(sections: Sequence[Section], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a body whose length depends on the data, as uint8.

    Raises:
        WireFormatError: an array does not fit its section.
    """
    parts, count = [np.empty(0, np.uint8)], 0
    for section, array in zip(sections, arrays, strict=True):
        if isinstance(section, CountSection):
            parts.append(section.encode(array))
            count = int(array[0])
        elif not isinstance(section, CountedSection):
            parts.append(section.encode(array))
        elif count:
            parts.append(section.exact(count).encode(array[:count]))
    return np.concatenate(parts)


def decode_bodies(bodies: Sequence[np.ndarray], sections: Sequence[Section]) -> list[np.ndarray]:
    """Decode bodies whose lengths depend on the data, one for each rank.

    Returns one array of shape ``(ranks, count)`` for every section.

    Raises:
        WireFormatError: a length is wrong or a section is malformed.
    """
    decoded = [_decode_variable(body, sections, rank) for rank, body in enumerate(bodies)]
    return [np.stack(rows) for rows in zip(*decoded, strict=True)]


def _decode_variable(body: np.ndarray, sections: Sequence[Section], rank: int) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    start = count = 0
    for section in sections:
        exact: Section | None = section
        if isinstance(section, CountedSection):
            exact = section.exact(count) if count else None
        stop = start + (exact.nbytes if exact is not None else 0)
        if stop > body.nbytes:
            raise WireFormatError(f"expected at least {stop} bytes in the body of rank {rank}, got {body.nbytes}")
        array = np.zeros(0, np.int32) if exact is None else exact.decode(body[None, start:stop])[0]
        if isinstance(section, CountSection):
            count = int(array[0])
        if isinstance(section, CountedSection):
            host = "uint16" if section.dtype == "bfloat16" else section.dtype
            padded = np.zeros(section.capacity, host)
            padded[: len(array)] = array
            array = padded
        arrays.append(array)
        start = stop
    if start != body.nbytes:
        raise WireFormatError(f"expected {start} bytes in the body of rank {rank}, got {body.nbytes}")
    return arrays
