"""The names that optimisers and quantizers derive from the names of what they replace.

They are hints: where values are at hand, values decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_SUFFIXES = (
    "_quantized",
    "_quant",
    "_scale",
    "_zero_point",
    "_QuantizeLinear",
    "_QuantizeLinear_Output",
    "_QuantizeLinear_Input",
    "_DequantizeLinear",
    "_DequantizeLinear_Output",
    "_DequantizeLinear_Input",
    "_cast_to_fp16",
    "_cast_to_fp32",
    "_nchwc",
    "_pre_reshape",
    "_post_reshape",
    "_output_quantized",
    "_quant_scales_mul",
    "_quant_output_scale_mul",
    "_output_quantized_cast",
    "_dequantized",
    "/MatMulAddFusion",
    "/MatMulScaleFusion",
    "/GemmActivationFusion",
)
"""ONNX Runtime's quantizers, float16 converter and optimisers."""
_PREFIXES = ("fused ", "reorder_token_", "gemm_input_reshape_")
_SUFFIX = re.compile(f"({'|'.join(map(re.escape, _SUFFIXES))})((_token)?_[0-9]+)?$")
"""A number makes a derived name unique."""
_DEEPEST = 4


def base_names(name: str) -> Iterator[str]:
    """List the names that a name may be derived from.

    Args:
        name: The name of a node or value of a changed file.

    Yields:
        The names, those with the least removed first.
    """
    seen, pending = {name}, [name]
    for _ in range(_DEEPEST):
        shorter = [base for one in pending for base in _shorten(one)]
        pending = [base for base in dict.fromkeys(shorter) if base and base not in seen]
        seen.update(pending)
        yield from pending


def _shorten(name: str) -> Iterator[str]:
    # Each suffix in turn: one may be the end of another.
    for start in (match.start() for match in map(_SUFFIX.search, (name,)) if match):
        yield name[:start]
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            yield name.removeprefix(prefix)
