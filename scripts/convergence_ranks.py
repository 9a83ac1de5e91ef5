"""What stock Horovod with ``compression=`` makes of the gradients of all ranks, computed in one process.

All ranks of a Horovod job hold the same weights, so one model is enough: it computes a gradient for each
rank's batch, each is encoded with that rank's own state, and the payloads are brought together in rank
order.  ``tests/parallel/cases/test_convergence.py`` holds this against real ranks: what travels through
the package's own exchange has the same bits; what Horovod's allreduce adds up may be added in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

import hvd_compress as hc
from hvd_compress import wire
from hvd_compress.codec import encode_step, learn, prepare_step
from hvd_compress.feedback import MomentumCorrection
from hvd_compress.ops.torch import TorchOps
from hvd_compress.packing import unpacked
from hvd_compress.step import Payload

OPS = TorchOps()
# Horovod's allreduce gets one float32 in the place of a gradient that is exchanged by the package.
TOKEN_BYTES = 4

Memory = dict[str, torch.Tensor]


class SimulatedRanks:
    """The ranks of a job: their states, and what each of them has sent.

    Args:
        compressor: what would be the ``compression`` argument.
        size: number of ranks.

    Attributes:
        bytes_sent: by the first rank so far, as ``compressor.stats()`` counts them, headers included.
        dense_bytes: what the gradients would have taken uncompressed.
        steps: made so far.
    """

    def __init__(self, compressor: hc.Compressor, size: int) -> None:
        self.compressor, self.size = compressor, size
        self.bytes_sent = self.dense_bytes = self.steps = 0
        self._layout: list[wire.Section] = []
        self._agreed: list[wire.Section] | None = None
        self._memories: dict[str, list[Memory]] = {}
        self._hints: dict[str, list[dict[str, float]]] = {}

    @torch.no_grad()
    def average(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the average that every rank gets of one step's gradients, which must be finite.

        Args:
            gradients: of each rank, by the parameter's name; the same parameters in every step.
        """
        self.steps += 1
        self._layout = []
        averages = {name: self._reduce(name, [of_rank[name] for of_rank in gradients]) for name in gradients[0]}
        self._count_headers()
        return averages

    def _count_headers(self) -> None:
        """Count what a message has besides payloads; and a whole one where ranks tell that their layout has changed."""
        agreed, self._agreed = self._agreed, self._layout
        if not self._layout and not agreed:
            return
        self.bytes_sent += wire.HEADER_BYTES
        if agreed is not None and agreed != self._layout:
            self.bytes_sent += wire.HEADER_BYTES
            self.bytes_sent += 0 if wire.is_variable(agreed) else sum(section.nbytes for section in agreed)

    def _reduce(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        spec = hc.TensorSpec(tuple(parts[0].shape), OPS.dtype(parts[0]))
        self.dense_bytes += parts[0].nbytes
        number = self.steps - 1
        algorithm = self.compressor.choose(name, spec).at(number)
        memories = self._memories.setdefault(name, [{} for _ in parts])
        if not algorithm.compresses(spec):
            return self._dense(algorithm, parts, memories, spec)
        payloads = self._encode(algorithm, name, number, parts, memories, spec)
        if algorithm.collective is hc.Collective.ALLREDUCE:
            total = self._allreduce(algorithm, payloads, memories, spec)
        else:
            total = self._allgather(algorithm, payloads, memories, spec)
        return total.to(parts[0].dtype).view(spec.shape)

    def _encode(
        self,
        algorithm: hc.Compressor,
        name: str,
        number: int,
        parts: list[torch.Tensor],
        memories: list[Memory],
        spec: hc.TensorSpec,
    ) -> list[Payload]:
        exact = [{slot: unpacked(x, spec.accumulator, OPS) for slot, x in kept.items()} for kept in memories]
        hints = self._hints.setdefault(name, [{} for _ in parts])
        steps = [hc.Step(name, number, rank, self.size, memory, hints=hints[rank]) for rank, memory in enumerate(exact)]
        first = [prepare_step(algorithm, g, spec, OPS, step) for g, step in zip(parts, steps, strict=True)]
        if first[0] is not None:
            self.bytes_sent += first[0].nbytes + TOKEN_BYTES
            agreed = self._mean(first)
            steps = [dataclasses.replace(step, agreed=agreed) for step in steps]
        payloads = []
        for gradient, step, kept in zip(parts, steps, memories, strict=True):
            payload, new = encode_step(algorithm, gradient, spec, OPS, step, in_place=True)
            kept.update(new)
            payloads.append(payload)
        return payloads

    def _dense(
        self, algorithm: hc.Compressor, parts: list[torch.Tensor], memories: list[Memory], spec: hc.TensorSpec
    ) -> torch.Tensor:
        self.bytes_sent += parts[0].nbytes
        mean = self._mean(parts)
        if not isinstance(algorithm.feedback, MomentumCorrection):
            return mean
        # The same on all ranks.
        update, momentum = algorithm.feedback.after_average(memories[0], mean, spec, OPS)
        memories[0]["momentum"] = momentum
        return update.view(spec.shape).clone()

    def _allreduce(
        self, algorithm: hc.Compressor, payloads: list[Payload], memories: list[Memory], spec: hc.TensorSpec
    ) -> torch.Tensor:
        self.bytes_sent += payloads[0].arrays[0].nbytes
        mean = self._mean([payload.arrays[0] for payload in payloads])
        for memory in memories:
            memory.update(learn(algorithm, mean, memory, spec, OPS))
        total = algorithm.decode((mean, *payloads[0].common), spec, OPS)
        return self._release(algorithm, total, memories, spec).clone()

    def _allgather(
        self, algorithm: hc.Compressor, payloads: list[Payload], memories: list[Memory], spec: hc.TensorSpec
    ) -> torch.Tensor:
        self._layout += algorithm.sections(spec)
        self.bytes_sent += TOKEN_BYTES + _payload_bytes(algorithm, payloads[0], spec)
        gathered = [torch.stack(arrays) for arrays in zip(*(payload.arrays for payload in payloads), strict=True)]
        total = algorithm.combine(gathered, spec, OPS)
        total = self._release(algorithm, total, memories, spec)
        return OPS.scale_(total, 1.0 / self.size)

    def _release(
        self, algorithm: hc.Compressor, total: torch.Tensor, memories: list[Memory], spec: hc.TensorSpec
    ) -> torch.Tensor:
        if algorithm.feedback is None:
            return total
        # The same on all ranks.
        total, new = algorithm.feedback.release(memories[0], total, spec, OPS)
        memories[0].update(new)
        return total

    def _mean(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.mul_(1.0 / self.size)


def _payload_bytes(algorithm: hc.Compressor, payload: Payload, spec: hc.TensorSpec) -> int:
    sections = algorithm.sections(spec)
    if wire.is_variable(sections):
        return wire.encode_body(sections, OPS.to_host(list(payload.arrays))).nbytes
    return sum(section.nbytes for section in sections)
