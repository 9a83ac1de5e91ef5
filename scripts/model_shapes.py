"""The shapes of well-known models, for benchmarks."""

from __future__ import annotations


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 parameters, in the order of its layers."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, inputs: int, size: int) -> None:
        shapes.extend([(out, inputs, size, size), (out,), (out,)])

    convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inputs, 1)
            inputs = 4 * width
    shapes.extend([(1000, 2048), (1000,)])
    return shapes
