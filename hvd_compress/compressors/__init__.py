"""All compressors; tests and documentation iterate over this list."""

from hvd_compress.compressors.topk import TopK

ALL = (TopK,)

__all__ = ["ALL", "TopK"]
