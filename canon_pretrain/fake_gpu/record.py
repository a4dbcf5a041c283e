"""The record of a fake run: what a phase of the program did, and the whole report."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canon_pretrain.kernels.work import Work

STEP_NAMES = ("first step", "quiet step", "logged step")
"""The steps of a fake run: the first one compiles, the second one logs nothing."""
BETWEEN = "start"
"""The phase of what happens before and between others."""
REPORT = "CANON_FAKE_REPORT"
"""Environment variable that names the file of the report."""


@dataclass
class Phase:
    """What happened between two moments of a run."""

    name: str
    peak_bytes: int
    peak_parts: dict[str, int]
    end_bytes: int = 0
    seconds: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)
    """"KIND at FILE:LINE FUNCTION" -> how often the host waited for the device there."""
    compiled: Work = field(default_factory=Work)
    eager: Work = field(default_factory=Work)
    eager_operators: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)
    graphs: list[str] = field(default_factory=list)
    """Names of the graphs that were compiled."""
    recompiles: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)

    def work(self) -> Work:
        """Return the work of compiled graphs and of single operators."""
        work = Work()
        work.add(self.compiled)
        work.add(self.eager)
        return work


@dataclass(frozen=True)
class Options:
    """What is faked: GPUs of which model, on how many ranks; `saves`: stage two checkpoints."""

    gpu: str = "h100"
    world_size: int = 8
    saves: bool = True


@dataclass
class Report:
    """The outcome of a fake run."""

    arguments: list[str]
    gpu: str
    world_size: int
    memory_bytes: int
    micro_batch: int = 0
    seq_len: int = 0
    num_blocks: int = 0
    """Blocks times micro-batches of a step."""
    step_seconds: list[float] = field(default_factory=list)
    """Of a quiet step, computed from its counts: slow, likely, fast."""
    phases: list[Phase] = field(default_factory=list)
    error: str = ""
    error_line: str = ""
    traceback: str = ""
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return max(phase.peak_bytes for phase in self.phases)

    def phase(self, name: str) -> Phase:
        """Return the first phase of this name. Raises KeyError."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)


def report_from(row: Mapping[str, Any]) -> Report:
    """Return the report whose JSON, by `json.dumps(report, default=vars)`, is `row`."""
    phases = [_phase_from(fields) for fields in row["phases"]]
    return Report(**{**row, "phases": phases})


def _phase_from(fields: Mapping[str, Any]) -> Phase:
    values = dict(fields)
    for declared in dataclasses.fields(Phase):
        if declared.default_factory is Counter:
            values[declared.name] = Counter(values[declared.name])
        elif declared.default_factory is Work:
            values[declared.name] = _work_from(values[declared.name])
    return Phase(**values)


def _work_from(row: Mapping[str, Any]) -> Work:
    return Work(**{**row, "flops": Counter(row["flops"])})
