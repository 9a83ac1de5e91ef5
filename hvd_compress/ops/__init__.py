"""Array operations, one implementation per framework.

Algorithms are written once against the :class:`~hvd_compress.ops.base.Ops` protocol.
``numpy`` is the reference that the others are tested against; ``torch`` runs on any
device without synchronising with it.
"""
