"""The bytes that ranks exchange.

**Message.**  Once a step every rank contributes one message; unless there are counted
sections, all messages of a step have the same length, which each rank knows beforehand.
All integers are little-endian.

======  ====  =====================================================================
offset  size  field
======  ====  =====================================================================
0       4     magic, the ASCII letters ``HVDC``
4       1     version of this format: 1
5       1     kind: 0 = data, 1 = "my layout has changed" (the body is then ignored)
6       2     reserved, zero
8       8     layout: the first 8 bytes of the SHA-256 that the ranks agreed on
16      4     signed: position, in the layout, of the first tensor of this rank that
              holds NaN or infinity; -1 if all are finite
20      4     step: exchanges done before this one, modulo 2**32
24      8     bytes in the body
32            body: the sections of all tensors in layout order, without gaps
======  ====  =====================================================================

**Sections.**  But for counted ones, a section's length depends on the layout alone.

*Array*: ``count`` elements of one dtype, little-endian; bfloat16 as its 16 bits.

*Index set*: ``k`` distinct positions below ``n`` in ascending order, Elias-Fano coded
(P. Elias, "Efficient storage and retrieval by content and address of static files",
JACM 21(2), 1974).  With ``l = floor(log2(n / k))``, a position's ``l`` low bits go into a
first bit field, ``k * l`` bits long, one position after the other, and its remaining high
part ``h`` sets bit ``h + i`` of a second field, ``k + ((n - 1) >> l)`` bits long, where
``i`` counts the positions from 0.  Bit 0 of a byte is its lowest; each field is padded with
zero bits to a whole byte.  This takes about ``l + 2`` to ``l + 3`` bits a position: 12 at a
ratio of 0.001, where a plain int32 takes 32.

*Count*: an int32, followed by *counted* sections, which are arrays or index sets of so many
elements (of none, no bytes).  A layout that has them fixes no length: the ranks then exchange
the lengths of their messages first, 8 bytes each.

A reader checks everything (magic, version, lengths, number of positions, order, range,
padding) and raises :class:`~hvd_compress.errors.WireFormatError` before any position is
used.  The values themselves are not checked: NaN and infinity are legal.
"""

from hvd_compress.wire.codec import (
    HEADER_BYTES,
    Header,
    Kind,
    decode_bodies,
    decode_body,
    decode_header,
    encode_body,
    encode_message,
    frame,
    is_variable,
    split_messages,
)
from hvd_compress.wire.indices import index_bytes
from hvd_compress.wire.sections import ArraySection, CountedSection, CountSection, IndexSection, Section

__all__ = [
    "HEADER_BYTES",
    "ArraySection",
    "CountSection",
    "CountedSection",
    "Header",
    "IndexSection",
    "Kind",
    "Section",
    "decode_bodies",
    "decode_body",
    "decode_header",
    "encode_body",
    "encode_message",
    "frame",
    "index_bytes",
    "is_variable",
    "split_messages",
]
