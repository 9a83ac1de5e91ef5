"""Where a framework, Horovod's calls and the compressors meet."""
