"""Linear layers that read the same input, such as query, key and value, as one product in a compiled layer.

Decoding few sequences takes most of its time to start kernels and to wait for memory, so that one kernel for three
small products is up to three times as fast. The weights are moved next to each other in memory, where each is still a
tensor of its own: there is no second copy, and the trainer updates them as before. The products are found in the graph
of the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn.functional import linear
from torch.utils.dlpack import from_dlpack

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
ALIGNED = 16  # bytes: matrix products read so many at once

_buffers: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by the address of each tensor that keeps them


def join_weights(layers: Iterable[nn.Module]) -> None:
    """Move weights and biases of linear layers that read inputs of one size, in one module, next to each other."""
    for module in (module for layer in layers for module in layer.modules()):
        for linears in _linears_by_input(module):
            _side_by_side([each.weight for each in linears])
            if linears[0].bias is not None:
                _side_by_side([each.bias for each in linears])


def _linears_by_input(module: nn.Module) -> list[list[nn.Linear]]:
    groups: dict[tuple[Any, ...], list[nn.Linear]] = {}
    for each in module.children():
        if type(each) is nn.Linear and each.weight.dtype in HALF and each.weight[0].nbytes % ALIGNED == 0:
            kind = (each.in_features, each.weight.dtype, each.weight.device, each.bias is None)
            groups.setdefault(kind, []).append(each)
    return [linears for linears in groups.values() if len(linears) > 1]


def _side_by_side(parameters: Sequence[Tensor]) -> None:
    buffer = torch.cat([each.data for each in parameters])
    parts = torch.split(buffer, [len(each) for each in parameters])
    for each, part in zip(parameters, parts, strict=True):
        each.data = from_dlpack(part)  # a storage of its own: it is saved and compared as if it were alone
        _buffers[each.data_ptr()] = buffer


def _joined(parts: list[Tensor]) -> Tensor | None:
    """The parts as one tensor, if they lie next to each other in this order."""
    start = address = parts[0].data_ptr()
    buffer = _buffers.get(start)
    for part in parts:
        if buffer is None or part.data_ptr() != address:
            return None
        address += part.nbytes
    assert buffer is not None
    first = (start - buffer.data_ptr()) // (buffer.nbytes // len(buffer))
    return buffer[first : first + sum(map(len, parts))]


def _joined_linear(hidden: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    weight, bias = _joined(weights), _joined(biases) if biases else None
    if weight is not None and (bias is not None or not biases):
        return linear(hidden, weight, bias)
    own: Sequence[Tensor | None] = biases or [None] * len(weights)
    return torch.cat([linear(hidden, each, bias) for each, bias in zip(weights, own, strict=True)], dim=-1)


joined_linear = torch.library.custom_op(
    "oxrl::joined_linear",
    _joined_linear,
    mutates_args=(),
    schema="(Tensor hidden, Tensor[] weights, Tensor[] biases) -> Tensor",
)


@joined_linear.register_fake
def _(hidden: Tensor, weights: list[Tensor], _biases: list[Tensor]) -> Tensor:
    return hidden.new_empty(hidden.shape[0], sum(weight.shape[0] for weight in weights))


class JoinLinears(CustomGraphPass):
    """A pass of the compiler: products of one input in half precision become one `joined_linear`."""

    def __call__(self, graph: fx.Graph) -> None:
        groups: dict[tuple[Any, ...], list[fx.Node]] = {}
        for node in graph.nodes:
            if (operands := _operands(node)) is not None:
                hidden, _, bias = operands
                groups.setdefault((_source(hidden), bias is None), []).append(node)
        for nodes in groups.values():
            if len(nodes) > 1:
                _replace(graph, nodes)

    def uuid(self) -> Any:
        return get_hash_for_files((str(Path(__file__)),))


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Return input, weight and bias of a product with the transpose of a parameter in half precision."""
    hidden: Any
    bias: Any = None
    if node.target is aten.mm.default:
        hidden, transposed = node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, hidden, transposed = node.args
    else:
        return None
    if not isinstance(transposed, fx.Node) or transposed.target is not aten.permute.default:
        return None
    weight: Any = transposed.args[0]
    parameters = [weight] if bias is None else [weight, bias]
    if any(each.op != "placeholder" or not each.meta["val"].is_contiguous() for each in parameters):
        return None
    if weight.meta["val"].dtype not in HALF or weight.meta["val"].dim() != 2:
        return None
    if bias is not None and bias.meta["val"].shape != weight.meta["val"].shape[:1]:
        return None
    return hidden, weight, bias


def _source(hidden: fx.Node) -> tuple[Any, ...]:
    """Equal for inputs that are the same tensor: each linear layer reshapes its own to `[M, K]`."""
    if hidden.target in (aten.reshape.default, aten.view.default):
        return hidden.args[0], str(hidden.args[1])
    return (hidden,)


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    operands = [found for found in map(_operands, nodes) if found is not None]
    hidden, weights = operands[0][0], [weight for _, weight, _ in operands]
    biases = [bias for _, _, bias in operands if bias is not None]
    ends = torch.tensor([0, *(node.meta["val"].shape[1] for node in nodes)]).cumsum(0).tolist()
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(torch.ops.oxrl.joined_linear.default, (hidden, weights, biases))
        first = nodes[0].meta["val"]
        joined.meta["val"] = first.new_empty(first.shape[0], ends[-1])
        for index, node in enumerate(nodes):
            bounds = (1, ends[index], ends[index + 1])
            product = graph.call_function(aten.slice.Tensor, (joined, *bounds))
            product.meta["val"] = aten.slice.Tensor(joined.meta["val"], *bounds)
            node.replace_all_uses_with(product)
    for node in nodes:
        graph.erase_node(node)
