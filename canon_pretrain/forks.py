"""A server whose forks run `canon`: what training needs is imported once, for all of them."""

import os
from importlib import import_module

from canon_pretrain.core.children import serve
from canon_pretrain.core.cli import run_process
from canon_pretrain.stages import split_command
from canon_pretrain.titan import device


def serve_forks(*modules: str) -> None:
    """Import what training needs, then run `canon ARGUMENTS` in a forked child for each request.

    NAME=VALUE before the arguments sets variables, as for `env`. `modules`: what else to import.
    Returns at once on GPUs: CUDA does not survive a fork.
    """
    device.prepare_process()
    if device.has_accelerator():
        return
    device.prepare_device()
    import torch
    from torch._inductor import compile_fx, cpu_vec_isa  # noqa: F401

    from canon_pretrain.__main__ import main as canon
    from canon_pretrain.titan import command_line, data, dry_run, launch, trainer  # noqa: F401

    for module in modules:
        import_module(module)
    cpu_vec_isa.pick_vec_isa()  # starts a process per instruction set

    def run(command: list[str]) -> None:
        variables, arguments = split_command(command)
        os.environ.update(variables)
        if "OMP_NUM_THREADS" in variables:  # which torch has read
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        run_process(lambda: canon(arguments))

    serve(run)
