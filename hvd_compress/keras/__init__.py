"""Horovod for Keras 3 on TensorFlow, with or without gradient compression.

Stock Horovod's ``DistributedOptimizer`` does nothing under Keras 3, without saying so.  This
package has the names of ``horovod.tensorflow.keras``, so a script needs one changed line::

    import hvd_compress.keras as hvd
    from hvd_compress import TopK

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()), compression=TopK(0.001))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

import keras as _keras

from hvd_compress.keras.requirements import check_keras

check_keras(_keras.__version__, _keras.backend.backend())

from horovod.tensorflow import (  # noqa: E402 - after the check
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

from hvd_compress.keras import callbacks  # noqa: E402
from hvd_compress.keras.functions import (  # noqa: E402
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from hvd_compress.keras.optimizer import DistributedOptimizer  # noqa: E402
from hvd_compress.keras.variables import broadcast_variables  # noqa: E402

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
