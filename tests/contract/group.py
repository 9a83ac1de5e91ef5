"""Ranks in one process, driven as the adapters drive them."""

import dataclasses
import functools

import numpy as np

from hvd_compress import Collective, Step, TensorSpec
from hvd_compress.codec import encode_step, learn, prepare_step
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch import TorchOps
from hvd_compress.packing import unpacked

NUMPY, TORCH = NumpyOps(), TorchOps()


def tensor(array, ops):
    """Return an array as a tensor of its own."""
    copied = np.array(array)
    if ops.name == "numpy":
        return copied
    if ops.name == "torch":
        import torch

        return torch.from_numpy(copied)
    import tensorflow as tf

    return tf.constant(copied)


def array(x, ops):
    """Return a tensor as float64."""
    host = ops.to_host([x])[0]
    if host.dtype == np.uint16:  # bfloat16
        host = (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float64)


class Group:
    """Some ranks that train one parameter; ``step`` returns what Horovod's Average would."""

    def __init__(self, compressor, shape, dtype="float64", ops=NUMPY, size=1, key="weight"):
        self.compressor, self.spec, self.ops = compressor, TensorSpec(tuple(shape), dtype), ops
        self.memory, self.number, self.key = [{} for _ in range(size)], 0, key
        self.payloads = []

    def step(self, gradients):
        algorithm, spec, ops, size = self.compressor.at(self.number), self.spec, self.ops, len(self.memory)
        self.payloads = []
        xs = [ops.astype(tensor(np.asarray(g, np.float64), ops), spec.dtype) for g in gradients]
        known = [{name: unpacked(x, spec.accumulator, ops) for name, x in memory.items()} for memory in self.memory]
        steps = [Step(self.key, self.number, rank, size, memory) for rank, memory in enumerate(known)]
        if algorithm.two_rounds:
            first = [prepare_step(algorithm, x, spec, ops, step) for x, step in zip(xs, steps, strict=True)]
            agreed = functools.reduce(lambda a, b: a + b, first)
            steps = [dataclasses.replace(step, agreed=agreed) for step in steps]
        for memory, x, step in zip(self.memory, xs, steps, strict=True):
            payload, new = encode_step(algorithm, x, spec, ops, step)
            memory.update(new)
            self.payloads.append(payload)
        self.number += 1
        total = self._gathered(algorithm) if algorithm.collective is Collective.ALLGATHER else self._reduced(algorithm)
        if algorithm.feedback is not None:
            releases = [algorithm.feedback.release(memory, total, spec, ops) for memory in self.memory]
            total = releases[0][0]
            for memory, (_, new) in zip(self.memory, releases, strict=True):
                memory.update(new)
        return (array(total, ops) / size).reshape(spec.shape)

    def _gathered(self, algorithm):
        host = [self.ops.to_host(list(payload.arrays)) for payload in self.payloads]
        stacked = [np.stack(arrays) for arrays in zip(*host, strict=True)]
        dtypes = [section.dtype for section in algorithm.sections(self.spec)]
        arrays = self.ops.from_host(stacked, dtypes, self.payloads[0].arrays[0])
        return algorithm.combine(arrays, self.spec, self.ops)

    def _reduced(self, algorithm):
        total = self.payloads[0].arrays[0]
        for payload in self.payloads[1:]:
            total = total + payload.arrays[0]
        for memory in self.memory:
            memory.update(learn(algorithm, total, memory, self.spec, self.ops))
        return algorithm.decode((total, *self.payloads[0].common), self.spec, self.ops)

    def decoded(self, rank=0):
        """Return what the last payload of a rank decodes to."""
        payload = self.payloads[rank]
        algorithm = self.compressor.at(self.number - 1)
        x = algorithm.decode((*payload.arrays, *payload.common), self.spec, self.ops)
        return array(x, self.ops).reshape(self.spec.shape)

    def kept(self, slot="residual", rank=0):
        """Return what a rank remembers, as float64."""
        kept = unpacked(self.memory[rank][slot], self.spec.accumulator, self.ops)
        return array(kept, self.ops).reshape(self.spec.shape)


def once(compressor, x, dtype=None, ops=NUMPY, number=0, key="weight"):
    """Return what is decoded of ``x`` in one step without feedback, as float64."""
    x = np.asarray(x)
    group = Group(compressor, x.shape, dtype or x.dtype.name, ops, key=key)
    group.number = number
    group.step([x])
    return group.decoded()


def noise(n, purpose, number, rank=0, seed=0, key="weight"):
    """Return the random numbers of a step, for references that must draw the same."""
    return NUMPY.uniform(n, Step(key, number, rank).keys(seed, purpose), None).astype(np.float64)
