"""All ranks' training of a small MLP in float64 NumPy, written independently of the package and of Keras."""

import numpy as np

INPUTS, HIDDEN, OUTPUTS = 24, 48, 8
NAMES = ["hidden/kernel", "hidden/bias", "output/kernel", "output/bias"]
SHAPES = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, OUTPUTS), (OUTPUTS,)]
MIN_NUMEL = 256  # both kernels are compressed, the biases are not


def initial_weights(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.3, shape).astype(np.float32) for shape in SHAPES]


def rank_data(rank, steps, batch=8, seed=0):
    """Return the inputs and targets of a rank, ``batch`` rows for each step."""
    rng = np.random.default_rng((seed, 17, rank))
    return (
        rng.normal(size=(steps * batch, INPUTS)).astype(np.float32),
        rng.normal(size=(steps * batch, OUTPUTS)).astype(np.float32),
    )


def mlp_gradients(weights, x, y):
    """Return the gradients of the mean squared error of ``tanh(x w1 + b1) w2 + b2``."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    d_output = 2 * (hidden @ w2 + b2 - y) / y.size
    d_hidden = d_output @ w2.T * (1 - hidden**2)
    return [x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_output, d_output.sum(0)]


class SGD:
    def __init__(self, lr, momentum=0.0, nesterov=False):
        self.lr, self.momentum, self.nesterov, self.velocity = lr, momentum, nesterov, {}

    def step(self, i, w, g, lr, count):
        if not self.momentum:
            return w - lr * g
        v = self.velocity[i] = self.momentum * self.velocity.get(i, 0.0) - lr * g
        return w + (self.momentum * v - lr * g if self.nesterov else v)


class Adam:
    def __init__(self, lr, epsilon, b1=0.9, b2=0.999):
        self.lr, self.epsilon, self.b1, self.b2, self.m, self.v = lr, epsilon, b1, b2, {}, {}

    def step(self, i, w, g, lr, count):
        m = self.m[i] = self.b1 * self.m.get(i, 0.0) + (1 - self.b1) * g
        v = self.v[i] = self.b2 * self.v.get(i, 0.0) + (1 - self.b2) * g * g
        alpha = lr * np.sqrt(1 - self.b2**count) / (1 - self.b1**count)
        return w - alpha * m / (np.sqrt(v) + self.epsilon)


def clip_norm(limit):
    return lambda grads: [g * min(1.0, limit / np.linalg.norm(g)) for g in grads]


def clip_global_norm(limit):
    def clip(grads):
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        return [g * min(1.0, limit / norm) for g in grads]

    return clip


def clip_value(limit):
    return lambda grads: [np.clip(g, -limit, limit) for g in grads]


class Simulation:
    """Training on all ranks.

    Args:
        reduce: function of a parameter's name and the list of all ranks' gradients.
        optimizers: one, or one for each parameter.
        accumulate: how many steps each update takes.
        sums: add the gradients of these up instead of averaging them.
        schedule: the learning rate as a function of the number of the step.
        ema: momentum of a moving average, that replaces the weights every ``ema_every`` steps
            and at the end.
        frozen: numbers of parameters that stay as they are.
    """

    def __init__(
        self,
        weights,
        reduce,
        optimizers,
        accumulate=1,
        sums=False,
        clip=None,
        decay=0.0,
        schedule=None,
        ema=None,
        ema_every=None,
        frozen=(),
    ):
        self.weights = [w.astype(np.float64) for w in weights]
        self.reduce = reduce
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers] * len(weights)
        self.accumulate, self.sums, self.clip, self.decay, self.schedule = accumulate, sums, clip, decay, schedule
        self.ema, self.ema_every, self.averages = ema, ema_every, None
        self.frozen = frozen
        self.steps = self.updates = 0
        self.collected = []

    def trained(self):
        return [i for i in range(len(self.weights)) if i not in self.frozen]

    def step(self, batches):
        """Take one step; ``batches`` holds one of each rank."""
        self.update([mlp_gradients(self.weights, x.astype(np.float64), y.astype(np.float64)) for x, y in batches])

    def update(self, gradients):
        """Apply the gradients of all ranks."""
        self.collected.append(gradients)
        if len(self.collected) == self.accumulate:
            self.apply()
            self.collected = []
        if self.ema is not None:
            before = self.averages or self.weights
            momentum = self.ema if self.averages else 0.0
            pairs = zip(before, self.weights, strict=True)
            self.averages = [momentum * a + (1 - momentum) * w for a, w in pairs]
            if self.ema_every and (self.steps + 1) % self.ema_every == 0:
                self.weights = [a.copy() for a in self.averages]
        self.steps += 1

    def apply(self):
        self.updates += 1
        ranks = range(len(self.collected[0]))
        factor = 1.0 if self.sums else 1.0 / self.accumulate
        trained = self.trained()
        local = {i: [factor * sum(step[rank][i] for step in self.collected) for rank in ranks] for i in trained}
        grads = [self.reduce(NAMES[i], local[i]) for i in trained]
        if self.clip is not None:
            grads = self.clip(grads)
        for i, g in zip(trained, grads, strict=True):
            optimizer = self.optimizers[i]
            lr = self.schedule(self.steps) if self.schedule else optimizer.lr
            w = self.weights[i] * (1 - self.decay * lr)
            self.weights[i] = optimizer.step(i, w, g, lr, self.updates)

    def finish(self):
        if self.ema is not None:
            self.weights = self.averages
        return self.weights
