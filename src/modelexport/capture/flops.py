"""Count the floating-point operations of each module, with torch's own counter."""

from __future__ import annotations

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modelexport.capture.failure import model_run_error
from modelexport.capture.inputs import ModelInputs, run_model
from modelexport.modules.tree import ModuleTree


def count_flops(model: nn.Module, tree: ModuleTree, inputs: ModelInputs) -> dict[str, int]:
    """Run a model once, and count the operations of each module and of those below it.

    torch counts the operators that it has formulas for, such as matrix products and convolutions;
    others count as nothing.

    Args:
        model: The model, which is left as it was.
        tree: Its module tree.
        inputs: Its example inputs.

    Returns:
        The number of operations by module path, of modules that ran.

    Raises:
        ModelRunError: The model does not run on these inputs.
    """
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            run_model(model, inputs)
    except Exception as error:
        raise model_run_error(error) from error
    # The counter names modules by their path below the class of the first one that ran.
    root = type(model).__name__
    counts = {name: sum(by_operator.values()) for name, by_operator in counter.flop_counts.items()}
    names = {path: f"{root}.{path}" if path else root for path in tree}
    return {path: counts[name] for path, name in names.items() if name in counts}
