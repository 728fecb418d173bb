"""Lets the TorchScript exporter write a model without its weights, and writes those to one data file.

Above 2 GiB torch itself would write a file for every tensor, named after it: two models in one
folder would overwrite each other's weights.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch

from modelexport.baseline.calling import swapped

_SMALLEST = 1024
"""Up to this size a weight stays in the model, where readers of shapes and constants look for it."""
_PAGE = mmap.ALLOCATIONGRANULARITY
"""Each weight starts at a page, so that it can be mapped."""
_PARAMETERS = 0
"""The place of the weights among the arguments of torch's writer."""


@contextmanager
def weights_apart(target: Path) -> Iterator[Callable[[bytes], bytes]]:
    """While the block runs, torch writes one value for each large weight.

    What is yielded turns such bytes into the model that they stand for, and writes `<target>.data`.
    """
    held: dict[str, torch.Tensor] = {}
    write = torch._C.Graph._export_onnx  # type: ignore[attr-defined]

    def write_without(graph: Any, *arguments: Any) -> Any:
        weights: Mapping[str, torch.Tensor] = arguments[_PARAMETERS]
        held.update((name, value) for name, value in weights.items() if _size(value) > _SMALLEST)
        one = {name: value.new_zeros(1) if name in held else value for name, value in weights.items()}
        return write(graph, one, *arguments[1:])

    with swapped(torch._C.Graph, _export_onnx=write_without):
        yield lambda content: _with_data_file(content, held, target.with_name(f"{target.name}.data"))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_data_file(content: bytes, held: Mapping[str, torch.Tensor], data_file: Path) -> bytes:
    model = onnx.ModelProto.FromString(content)
    with data_file.open("wb") as out:
        for tensor in model.graph.initializer:
            if tensor.name not in held:
                continue
            values = held[tensor.name].detach().cpu().contiguous()
            out.seek(-(-out.tell() // _PAGE) * _PAGE)
            onnx.external_data_helper.set_external_data(tensor, data_file.name, out.tell(), _size(values))
            tensor.ClearField("raw_data")
            tensor.dims[:] = values.shape
            out.write(values.reshape(-1).view(torch.uint8).numpy().data)
    return bytes(model.SerializeToString())
