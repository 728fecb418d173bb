"""Modules with unusual inputs and outputs, branches and recurrent cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo import Example, animal, x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.fc(x))) * 2


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.yes = Branch()
        self.no = Branch()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return torch.cond(x.sum() > 0, lambda v: self.yes(v), lambda v: self.no(v), (x,)) + 1


@animal("torchscript")
def conditional_bodies() -> Example:
    return Conditional(), (x(2, 8),)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, (hidden, _) = self.lstm(x)
        return self.head(out), hidden


@animal()
def lstm() -> Example:
    return Recurrent(), (x(2, 5, 8),)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.gru(x)
        return self.cell(out[:, -1], hidden[0])


@animal()
def gru_and_cell() -> Example:
    return Gated(), (x(2, 4, 8),)


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, *, value: Tensor, gate: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        gated = torch.sigmoid(self.gate(gate))
        return {"zeta": self.fc(value) * gated * scale, "alpha": gated}


@animal()
def keyword_only_forward() -> Example:
    return KeywordOnly(), {"value": x(2, 8), "gate": x(2, 8) + 1}


@dataclass
class Result:
    score: Tensor
    cache: object
    hidden: tuple[Tensor, ...]


class Cache:
    pass


class MixedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Result:
        y = self.fc(x)
        return Result(y.sum(-1), Cache(), (y, torch.relu(y)))


@animal()
def outputs_not_tensors() -> Example:
    return MixedOutput(), (x(2, 8),)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(4, 8)

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        return (self.a(pair[0]) + self.b(pair[1])) * mask


@animal()
def nested_inputs() -> Example:
    return TwoInputs(), ((x(2, 8), x(2, 4)), torch.ones(2, 8))


class StepByStep(nn.Module):
    """One cell that runs along the time axis, with sizes that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, step] + state))
        return state


@animal()
def cell_in_a_loop() -> Example:
    return StepByStep(), (x(2, 4, 8),)


class BranchesWithoutWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.yes = nn.ReLU()
        self.no = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cond(y.sum() > 0, lambda v: self.yes(v), lambda v: self.no(v), (y,))


@animal("torchscript")
def conditional_without_weights() -> Example:
    return BranchesWithoutWeights(), (x(2, 8),)


class CallsTwiceInABranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: Tensor) -> Tensor:
        once, twice = self.branch, lambda v: self.branch(self.branch(v))
        return torch.cond(x.abs().sum() < 0, lambda v: once(v), twice, (x,))


@animal("torchscript")
def conditional_module_twice() -> Example:
    return CallsTwiceInABranch(), (x(2, 8),)


class ConditionInACondition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.yes, self.no = Branch(), Branch(), nn.Linear(8, 8)

    def choose(self, x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 9, lambda v: self.yes(v), lambda v: self.no(v).tanh(), (x,))

    def forward(self, x: Tensor) -> Tensor:
        taken = x.abs().sum() > 0
        return torch.cond(taken, lambda v: self.choose(self.outer(v)), lambda v: self.no(v), (x,))


@animal("torchscript")
def conditional_in_a_conditional() -> Example:
    return ConditionInACondition(), (x(2, 8),)


class TakesPlainValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, shape: list[int], flag: bool = False) -> Tensor:
        y = self.fc(x).reshape(shape)
        return -y if flag else y


@animal("torchscript")
def plain_values_as_inputs() -> Example:
    return TakesPlainValues(), {"x": x(2, 8), "shape": [4, 4], "flag": True}


class HasDefaultNumbers(nn.Module):
    """The tracer would turn the numbers into inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 2.0, keep: int = 3) -> Tensor:
        return (self.fc(x) * scale)[:, :keep]


@animal()
def default_numbers() -> Example:
    return HasDefaultNumbers(), {"x": x(2, 8)}


class PlainRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.rnn(x)
        return self.fc(y), state


@animal()
def plain_recurrent() -> Example:
    return PlainRecurrent(), (x(5, 2, 8),)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.fc(x).chunk(2, -1)


class Extremes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return least, most


class ReadsOneOfSeveral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.extremes = Extremes()

    def forward(self, x: Tensor) -> Tensor:
        second = self.halves(x)[1]
        return second.relu() * self.extremes(second)[1]


@animal()
def one_of_several_results() -> Example:
    return ReadsOneOfSeveral(), (x(2, 8),)


class KeysLikeInnerNames(nn.Module):
    """Keys that the graph already uses: an input, an initializer, operations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        centred = x - x.mean(-1, keepdim=True)
        y = self.fc(centred)
        return {
            "mean": y,
            "x": self.gate(x).relu(),
            "fc.weight": y * 2,
            "linear": y + 1,
            "": y - 1,
            "0": y.tanh(),
        }


@animal()
def keys_like_inner_names() -> Example:
    return KeysLikeInnerNames(), (x(2, 8),)


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, scale: Tensor, fields: dict[str, Tensor]) -> Tensor:
        return self.fc(fields["left"]) * scale + fields["right"]


@animal()
def dict_at_the_end() -> Example:
    return TakesADict(), (x(1), {"left": x(2, 8), "right": x(2, 8) + 1})


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.fc(first) * second


@animal()
def keywords_out_of_order() -> Example:
    return TakesTwo(), {"second": x(2, 1), "first": x(2, 8)}
