"""How messages travel: byte buffers in, everybody's byte buffers out.

A transport knows nothing of tensors.  ``mpi`` uses mpi4py, ``horovod`` uses a named
``hvd.allgather`` (the only way where there is no MPI, as under ``horovodrun --gloo``), and
``threads`` joins ranks that are threads of one process, for tests.
"""
