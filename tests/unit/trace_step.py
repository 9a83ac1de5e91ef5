"""Print, as JSON, the graph that Horovod runs for one compressed gradient where there are several ranks."""

import json
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_compress.ops.tensorflow
from hvd_compress import TopK

hvd.init()
dtype = tf.as_dtype(sys.argv[1])
# Whatever is chosen where there is no GPU, the graph that one would get is asked for.
hvd_compress.ops.tensorflow._HOST = "nowhere"
variable = tf.Variable(tf.zeros((100, 200), dtype))
compression = TopK(0.01)


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * x)
    return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])


def graphs(graph):
    """Yield a graph and those of its branches."""
    yield graph
    for op in graph.get_operations():
        for branch in ("then_branch", "else_branch", "body", "cond"):
            if op.type in ("If", "StatelessIf", "While", "StatelessWhile") and branch in op.node_def.attr:
                name = op.get_attr(branch).name
                yield from graphs(graph._get_function(name).graph)


def branch_with_horovod(graph):
    return next(g for g in graphs(graph) if any(op.type == "HorovodAllgather" for op in g.get_operations()))


branch = branch_with_horovod(step.get_concrete_function(tf.zeros((100, 200), dtype)).graph)
nodes = []
for op in branch.get_operations():
    types = {
        name: tf.as_dtype(value.type).name
        for name, value in op.node_def.attr.items()
        if value.WhichOneof("value") == "type"
    }
    arguments = [a.name for a in op.op_def.input_arg]
    nodes.append(
        {
            "name": op.name,
            "type": op.type,
            "types": types,
            "inputs": [(t.op.name, t.shape.num_elements()) for t in op.inputs],
            "arguments": arguments if len(arguments) == len(op.inputs) else [arguments[0]] * len(op.inputs),
            "outputs": [t.shape.num_elements() for t in op.outputs],
            "results": [a.name for a in op.op_def.output_arg],
            "device": op.device,
        }
    )
print(json.dumps(nodes))
