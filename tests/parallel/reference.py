"""A float64 NumPy simulation of all ranks, written independently of the package."""

import math

import numpy as np


class Reference:
    """Top-k with error feedback, for all ranks at once.

    Args:
        ranks: the ranks that take part.
        wire: rounds a value to what is sent (for 16-bit gradients).
    """

    def __init__(self, ranks, ratio, min_numel=1024, feedback=True, wire=None):
        self.ranks = list(ranks)
        self.ratio = ratio
        self.min_numel = min_numel
        self.feedback = feedback
        self.wire = wire or (lambda x: x)
        self.residuals = {}

    def reduce(self, name, gradients, average=True):
        """Return the reduced gradient of one tensor; ``gradients`` holds one of each rank of the world."""
        total = np.zeros(gradients[0].shape)
        for rank in self.ranks:
            g = np.asarray(gradients[rank], np.float64)
            if g.ndim < 2 or g.size < self.min_numel:
                total += g
                continue
            a = g.reshape(-1) + self.residuals.get((name, rank), 0.0)
            k = math.ceil(round(self.ratio * a.size, 6))
            chosen = np.argsort(-np.abs(a), kind="stable")[:k]
            sent = np.zeros_like(a)
            sent[chosen] = self.wire(a[chosen])
            if self.feedback:
                self.residuals[name, rank] = a - sent
            total += sent.reshape(g.shape)
        return total / len(self.ranks) if average else total


class ReferenceSGD:
    """Plain SGD on float64 copies of a model's parameters."""

    def __init__(self, model, reference, lr, average=True):
        self.parameters = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
        self.reference, self.lr, self.average = reference, lr, average

    def step(self, gradients):
        for name in self.parameters:
            if name in gradients:
                self.parameters[name] -= self.lr * self.reference.reduce(name, gradients[name], self.average)

    def check(self, model, tolerance=2e-5):
        """Assert agreement within ``tolerance``, relative to the largest element."""
        for name, p in model.named_parameters():
            expected = self.parameters[name]
            error = np.abs(p.detach().double().numpy() - expected).max(initial=0.0)
            assert error <= tolerance * max(np.abs(expected).max(initial=0.0), 1e-3), (name, error)
