"""Generation and scoring on a fake H100: `python -m tests.fake_gpu_decode '{"mixer": ...}'`.

Prints JSON: where the host waits, by phase, and how often a captured step is replayed. A wait while
a CUDA graph is captured is a RuntimeError, as on a GPU.
"""

import json
import os
import sys

from canon_pretrain.fake_gpu import hooks

PROMPT, NEW_TOKENS = 64, 64


def main() -> None:
    hooks.load(hooks.build())
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from canon_pretrain.fake_gpu import device
    from canon_pretrain.fake_gpu.graphs import GraphCompiler
    from canon_pretrain.fake_gpu.tracker import Tracker
    from canon_pretrain.machine.gpus import GPUS

    tracker = Tracker()
    device.install(GPUS["h100"], 1, tracker)
    GraphCompiler(tracker).install()
    replays = []

    class Graph:
        def replay(self):
            replays.append(tracker.phase.name)

    class Capture(device.NoContext):
        def __enter__(self):
            self.waits = tracker.phase.waits.total()

        def __exit__(self, *details):
            if tracker.phase.waits.total() > self.waits:
                raise RuntimeError("the host waited while a graph was captured")

    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, Capture

    from dataclasses import replace

    from canon_pretrain.model.args import fill_sizes, flavor
    from canon_pretrain.model.decode import generate
    from canon_pretrain.model.transformer import Transformer

    given = json.loads(sys.argv[1])
    base = flavor("debug")
    args = replace(base, **given | fill_sizes(base, given))
    with FakeTensorMode(), torch.device("cuda"), tracker:
        torch.set_default_dtype(torch.bfloat16)
        model = Transformer(args).eval()
        with torch.no_grad():
            with tracker.within("generate"):
                prompts = [[1] * PROMPT, [1] * (PROMPT // 2)]
                generate(model, prompts, max_new_tokens=NEW_TOKENS)
            with tracker.within("score"):
                model(torch.ones(2, PROMPT, dtype=torch.int64))
    waits = {phase.name: dict(phase.waits) for phase in tracker.phases if phase.name != "start"}
    print(json.dumps({"waits": waits, "replays": len(replays)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
