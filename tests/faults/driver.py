"""Kill a run at many points, and compare each outcome with what is allowed.

`python driver.py SCENARIO MODE KILLS FOLDER` prints a JSON record. The run happens in a fork of
this process, which has torch loaded, so that a kill costs a fraction of a second. MODE is how the
run ends: `injected`, by SIGKILL before each of its file operations in turn; `killed`, by SIGKILL at
a random point; `interrupted`, by SIGINT at a random point; `rivals`, by SIGKILL at a random point
while another run writes the same output. A point is an audit event of Python; the run announces it
and goes on, so that the signal arrives at any instruction after it. The points are drawn with a
fixed seed, and no clock is involved.

A killed run may leave one hidden work folder. The next run in the folder removes it; from then on
the outputs are the earlier ones, or all of them are the new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelexport
from modelexport.onnx_file.atomic_write import PREFIX, transaction

Snapshot = dict[str, str]
_FILE_EVENTS = ("open", "os.", "shutil.", "fcntl.")
_SEED = 17


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
        self.norm = nn.LayerNorm(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x))


def export(target: Path, seed: int, strategy: str = "htp") -> None:
    modelexport.export_model(
        Net(seed), torch.ones(1, 40), target, strategy=strategy, external_data=True
    )


def damage(target: Path) -> None:
    """Damage tags and sidecar, so that they need repair."""
    import onnx

    model = onnx.load(str(target), load_external_data=False)
    tag = json.loads(model.graph.node[0].doc_string)
    model.graph.node[0].doc_string = json.dumps({**tag, "hierarchy_count": 99})
    onnx.save(model, str(target))
    sidecar = target.with_name(f"{target.stem}_hierarchy.json")
    sidecar.write_bytes(sidecar.read_bytes()[:-100])


class Scenario:
    """What is in the folder before, and what is done to it; another seed, another outcome."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.target = folder / "m.onnx"
        self.drawing = folder.parent / "drawing"

    def prepare(self) -> None:
        export(self.target, seed=0)
        if self.name == "repair":
            damage(self.target)
        if self.name == "import":
            self.drawing.mkdir(exist_ok=True)
            for seed in (1, 2):
                export(self.drawing / f"{seed}.onnx", seed)
                modelexport.export_graphml(
                    self.drawing / f"{seed}.onnx", self.drawing / f"{seed}.graphml"
                )
            for path in self.target.parent.iterdir():
                # import-onnx writes no sidecar, and does not replace a data file by another
                path.unlink()
            modelexport.strip(self.drawing / "2.onnx", self.target)

    def act(self, seed: int = 1) -> None:
        if self.name == "repair":
            modelexport.validate(self.target, repair=True)
        elif self.name == "import":
            modelexport.import_onnx(self.drawing / f"{seed}.graphml", self.target)
        else:
            export(self.target, seed, "fx" if self.name == "export-fx" else "htp")


def snapshot(folder: Path) -> Snapshot:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file()
    }


def fork(act: Callable[[], None], hook: Callable[[str, tuple[Any, ...]], None]) -> int:
    """Run something in a fork, with an audit hook; return the process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                sys.addaudithook(hook)
                act()
                code = 0
            except BaseException:
                # Handled, as a command handles it: the traceback keeps generators open, and they
                # clean up when it is released.
                pass
        finally:
            os._exit(code)
    return child


def work_folders(folder: Path) -> int:
    """Count the work folders that runs left."""
    return sum(path.name.startswith(PREFIX) for path in folder.iterdir())


class Kills:
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.pristine = folder.parent / "pristine"
        scenario.prepare()
        shutil.copytree(folder, self.pristine)
        self.before = snapshot(folder)
        self.after, self.file_events, self.events = self._complete(1)
        self.rival = self._complete(2)[0] if scenario.name != "repair" else self.after
        self.random = random.Random(_SEED)
        self.record: dict[str, Any] = dict.fromkeys(("kills", "before", "after", "left"), 0)
        self.record["wrong"] = []

    def _reset(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.pristine, self.folder)

    def _complete(self, seed: int) -> tuple[Snapshot, int, int]:
        """Run undisturbed; return the files, and the numbers of file operations and of events."""
        self._reset()
        reader, writer = os.pipe()
        file_events, events = Counter(self.folder), Counter()

        def act() -> None:
            sys.addaudithook(events)
            self.scenario.act(seed)
            os.write(writer, json.dumps([file_events.count, events.count]).encode())

        _, status = os.waitpid(fork(act, file_events), 0)
        assert status == 0, "the run itself fails"
        counts = json.loads(os.read(reader, 1000))
        assert modelexport.validate(self.scenario.target).valid
        return snapshot(self.folder), *counts

    def injected(self, kills: int) -> None:
        """Kill before each file operation; if there are more than kills, spread over all."""
        for number in range(min(kills, self.file_events)):
            last = number * self.file_events // min(kills, self.file_events)
            self._reset()
            hook = Counter(self.folder, last, lambda: os.kill(os.getpid(), signal.SIGKILL))
            _, status = os.waitpid(fork(self.scenario.act, hook), 0)
            self._judge(f"operation {last}", os.WIFSIGNALED(status), (self.before, self.after))

    def killed(self, kills: int, number: signal.Signals = signal.SIGKILL) -> None:
        for _ in range(kills):
            self._reset()
            point = self._start_and_signal(number)
            self._judge(f"event {point}", True, (self.before, self.after))

    def interrupted(self, kills: int) -> None:
        self.killed(kills, signal.SIGINT)

    def rivals(self, kills: int) -> None:
        for _ in range(kills):
            self._reset()
            rival = fork(lambda: self.scenario.act(2), lambda *_: None)
            point = self._start_and_signal(signal.SIGKILL)
            _, status = os.waitpid(rival, 0)
            self._judge(f"event {point}", status == 0, (self.rival, self.after))

    def _start_and_signal(self, number: signal.Signals) -> int:
        """Start a run, send it a signal after a random event, and wait for its end."""
        point = self.random.randrange(self.events * 11 // 10)  # some come after the end
        reader, writer = os.pipe()
        child = fork(self.scenario.act, Counter(None, point, lambda: os.close(writer)))
        os.close(writer)
        os.read(reader, 1)  # ends when the child closes its side, at the latest by its own end
        os.close(reader)
        os.kill(child, number)
        os.waitpid(child, 0)
        return point

    def _judge(self, point: str, as_meant: bool, allowed: tuple[Snapshot, Snapshot]) -> None:
        record = self.record
        left = work_folders(self.folder)
        with transaction(self.folder):  # the next run in the folder
            pass
        files = snapshot(self.folder)
        names = sorted(path.name for path in self.folder.iterdir())
        if files not in allowed or names != sorted(files) or left > 1 or not as_meant:
            same = [files == one for one in allowed]
            record["wrong"].append([point, names, same, left, as_meant])
        record["kills"] += 1
        record["left"] += left
        record["before"] += files == allowed[0]
        record["after"] += files == allowed[1]


class Counter:
    """An audit hook: count events, or file operations in a folder, and act at a certain one."""

    def __init__(
        self, folder: Path | None = None, last: int = -1, act: Callable[[], None] = lambda: None
    ) -> None:
        self.count = 0
        self._folder = folder
        self._last = last
        self._act = act

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is not None and not (
            event.startswith(_FILE_EVENTS)
            and any(str(self._folder) in str(argument) for argument in arguments)
        ):
            return
        self.count += 1
        if self.count > self._last >= 0:
            self._last = -1  # once: a signal may arrive before this function ends
            self._act()


def main() -> None:
    name, mode, kills, parent = sys.argv[1:]
    folder = Path(parent) / "folder"
    folder.mkdir()
    torch.set_num_threads(1)
    runs = Kills(Scenario(name, folder), folder)
    getattr(runs, mode)(int(kills))
    print(json.dumps(runs.record))


if __name__ == "__main__":
    main()
