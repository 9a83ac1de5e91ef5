"""All methods that are tested through Horovod, and a simulation of all ranks."""

import dataclasses
import os

import numpy as np

import hvd_compress as hc
from hvd_compress.codec import encode_step, learn, prepare_step
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.packing import unpacked

OPS = NumpyOps()

_METHODS = {
    "fp16": hc.FP16,
    "fp16-feedback": lambda: hc.FP16(feedback=hc.ErrorFeedback()),
    "topk-int8": lambda: hc.TopK(0.05, values=hc.Int8()),
    "topk-qsgd": lambda: hc.TopK(0.05, values=hc.QSGD(bits=2)),
    "topk-efsign": lambda: hc.TopK(0.05, values=hc.EFSign()),
    "topk-warm-up": lambda: hc.TopK(hc.warm_up(0.01, 8)),
    "topk-function": lambda: hc.TopK(lambda step: 0.1 if step < 3 else 0.02),
    "topk-int8-residual": lambda: hc.TopK(0.05, feedback=hc.ErrorFeedback(dtype="int8")),
    "topk-ef21": lambda: hc.TopK(0.05, feedback=hc.EF21()),
    "topk-decay": lambda: hc.TopK(0.05, feedback=hc.ErrorFeedback(0.9)),
    "randomk": lambda: hc.RandomK(0.1),
    "randomk-block": lambda: hc.RandomK(0.1, block=16, feedback=hc.ErrorFeedback()),
    "randomk-rolling": lambda: hc.RandomK(0.1, order="rolling", feedback=hc.ErrorFeedback()),
    "threshold": lambda: hc.Threshold(3.0),
    "adaptive": lambda: hc.AdaptiveThreshold(0.05),
    "adaptive-sample": lambda: hc.AdaptiveThreshold(0.05, fit="sample"),
    "coordinated": lambda: hc.CoordinatedTopK(0.1, chunk=16),
    "coordinated-leader": lambda: hc.CoordinatedTopK(0.05, by="leader"),
    "svd": lambda: hc.SVD(2),
    "atomo": lambda: hc.SVD(2, sampling="atomo"),
    "dgc": lambda: hc.DGC(0.05, momentum=0.5, clip_norm=10.0),
    "dgc-nesterov": lambda: hc.DGC(0.05, momentum=0.5, nesterov=True, warmup_steps=8),
    "int8": hc.Int8,
    "qsgd": lambda: hc.QSGD(4),
    "qsgd-l2": lambda: hc.QSGD(3, bucket=100, norm="l2"),
    "terngrad": hc.TernGrad,
    "natural": hc.Natural,
    "signsgd": hc.SignSGD,
    "signum": hc.Signum,
    "efsign": hc.EFSign,
    "onebit": lambda: hc.OneBit(bucket=128),
    "vector": lambda: hc.VectorQuantizer(8, 32),
    "vector-unbiased": lambda: hc.VectorQuantizer(4, 16, unbiased=True),
    "powersgd": lambda: hc.PowerSGD(2),
    "powersgd-two": lambda: hc.PowerSGD(2, alternating=False),
    "powersgd-two-fp16": lambda: hc.PowerSGD(2, alternating=False, factors=hc.FP16()),
    "powersgd-fp16": lambda: hc.PowerSGD(2, factors=hc.FP16()),
    "switch": lambda: hc.Switch({0: hc.NoCompression(), 3: hc.PowerSGD(2), 9: hc.TopK(0.05)}),
    "policy": lambda: hc.Policy({"first.*": hc.PowerSGD(1), "*.bias": None}, default=hc.TopK(0.05)),
}


def _with_transport(make):
    """Return a function that makes the compressor with the transport that is being tested."""
    transport = os.environ.get("HVD_COMPRESS_TEST_TRANSPORT", "auto")
    return lambda: dataclasses.replace(make(), transport=transport)


METHODS = {name: _with_transport(make) for name, make in _METHODS.items()}
# Sums are rounded differently by NumPy and PyTorch, and a level or a position may then change.
LOOSE = {
    "topk-qsgd",
    "topk-efsign",
    "topk-int8-residual",
    "powersgd-fp16",
    "powersgd-two-fp16",
    "qsgd-l2",
    "terngrad",
    "adaptive",
    "atomo",
    "efsign",
    "onebit",
    "vector",
    "vector-unbiased",
    "topk-int8",
}


class Simulation:
    """All ranks' compressors on one rank."""

    def __init__(self, compressor, size):
        self.compressor, self.size, self.states = compressor, size, {}

    def average(self, name, gradients):
        spec = hc.TensorSpec(gradients[0].shape, "float32")
        chosen = self.compressor.choose(name, spec)
        states = self.states.setdefault(name, [{"steps": 0} for _ in gradients])
        number = states[0]["steps"]
        algorithm = chosen.at(number)
        for state in states:
            state["steps"] += 1
        if not algorithm.compresses(spec):
            return self._dense(algorithm, gradients, states, spec)
        payloads = []
        memories = [{k: unpacked(v, "float32", OPS) for k, v in state.items() if k != "steps"} for state in states]
        steps = [hc.Step(name, number, rank, self.size, memory) for rank, memory in enumerate(memories)]
        if algorithm.two_rounds:
            agreed = sum(prepare_step(algorithm, g, spec, OPS, s) for g, s in zip(gradients, steps, strict=True))
            steps = [dataclasses.replace(step, agreed=agreed) for step in steps]
        for g, step, state in zip(gradients, steps, states, strict=True):
            payload, new = encode_step(algorithm, g, spec, OPS, step)
            state.update(new)
            payloads.append(payload)
        if algorithm.collective is hc.Collective.ALLREDUCE:
            mean = np.sum([p.arrays[0].astype(np.float64) for p in payloads], axis=0) / self.size
            mean = mean.astype(payloads[0].arrays[0].dtype)
            for state in states:
                state.update(learn(algorithm, mean, state, spec, OPS))
            total = algorithm.decode((mean, *payloads[0].common), spec, OPS)
        else:
            arrays = [np.stack(parts) for parts in zip(*(p.arrays for p in payloads), strict=True)]
            total = algorithm.combine(arrays, spec, OPS) / np.float32(self.size)
            if algorithm.feedback is not None:
                for state in states:
                    released, new = algorithm.feedback.release(state, total * self.size, spec, OPS)
                    state.update(new)
                total = released / np.float32(self.size)
        return total.reshape(spec.shape)

    def _dense(self, algorithm, gradients, states, spec):
        mean = np.mean(gradients, axis=0, dtype=np.float64).astype(np.float32)
        if isinstance(algorithm.feedback, hc.MomentumCorrection):
            for state in states:
                update, state["momentum"] = algorithm.feedback.after_average(state, mean, spec, OPS)
            return update.reshape(spec.shape)
        return mean
