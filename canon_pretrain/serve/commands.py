"""Serve a model at an endpoint that clients of OpenAI's completions know.

    canon serve RUN                        a run (its newest step), a step or an export
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon", "max_tokens": 20}'

On the GPU if there is one. SIGTERM and Ctrl-C let requests end for a few seconds.
"""

import argparse
import asyncio
import importlib.util
import math
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.cli import number_type, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import size
from canon_pretrain.hf.options import add_loading_options

if TYPE_CHECKING:  # import torch
    import torch

    from canon_pretrain.hf.sampling import Sampler
    from canon_pretrain.serve.scheduler import Scheduler

HOST = "127.0.0.1"
PORT = 8000
MAX_ROWS = 32
MAX_WAITING = 1024
MEMORY_SHARE = 0.5
"""Of the free memory, for the caches of all rows at their longest, unless --max-rows is set."""
GRACE_S = 5.0
"""For requests to end after SIGTERM; what runs longer is failed."""
BACKLOG = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a run (its newest step), RUN/checkpoint/step-N, or an export",
    )
    add("--host", default=HOST, help="address to listen at (default: %(default)s)")
    add(
        "--port",
        type=number_type(int, lambda port: 0 <= port < 1 << 16, "a port from 0 (any) to 65535"),
        default=PORT,
        metavar="N",
        help="(default: %(default)s; 0: any that is free)",
    )
    add(
        "--max-rows",
        type=positive,
        metavar="N",
        help=f"answers that are generated at once (default: {MAX_ROWS}, or as many as fit in half "
        "of the free memory)",
    )
    add(
        "--max-waiting",
        type=positive,
        default=MAX_WAITING,
        metavar="N",
        help="answers that may wait for a row; clients get 429 beyond (default: %(default)s)",
    )
    add_loading_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError."""
    # Before torch is imported and the model is loaded: these errors come at once.
    missing = [name for name in ("starlette", "uvicorn") if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(
            "serve.not_installed",
            f"{' and '.join(missing)} not installed: pip install -e '.[serve]', or "
            "pip install starlette uvicorn",
            missing=missing,
        )
    listener = _listen(arguments.host, arguments.port)

    from canon_pretrain.hf.sampling import Sampler
    from canon_pretrain.serve.app import Service
    from canon_pretrain.serve.scheduler import Scheduler

    sampler = Sampler.load(arguments.checkpoint, arguments.dtype, arguments.tokenizer)
    bytes_per_row = cache_bytes(sampler)
    max_rows = arguments.max_rows
    if max_rows is None:
        fitting = math.floor(MEMORY_SHARE * _free_memory(sampler.device) / bytes_per_row)
        max_rows = min(MAX_ROWS, max(1, fitting))

    scheduler = Scheduler(
        sampler.model,
        eos_id=sampler.tokenizer.eos_id,
        vocab_size=sampler.tokenizer.vocab_size,
        max_rows=max_rows,
        max_waiting=arguments.max_waiting,
    )
    scheduler.check_rows()
    name = model_name(sampler.checkpoint)
    service = Service(sampler, scheduler, [name, str(arguments.checkpoint)])

    host, port = listener.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    print(
        f"serving {name} at http://{shown_host}:{port}/v1 on {sampler.device.type}; {max_rows} "
        f"rows, whose caches take up to {size(max_rows * bytes_per_row)}",
        flush=True,
    )
    _serve(service.app, scheduler, listener)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            "serve.address",
            f"cannot listen at {host}:{port}: {error}. Choose another --host or --port",
            host=host,
            port=port,
        ) from None


def model_name(checkpoint: Path) -> str:
    """Return RUN/step-N by the name of the run's folder, or the name of an export's folder."""
    folder = checkpoint.resolve()
    if folder.parent.name == "checkpoint":
        return f"{folder.parent.parent.name}/{folder.name}"
    return folder.name


def cache_bytes(sampler: "Sampler") -> int:
    """Return the bytes of the cache of a row of max_seq_len tokens."""
    import torch

    from canon_pretrain.model.cache import Cache

    cache = Cache.of(sampler.model.args)
    with torch.no_grad():
        sampler.model(torch.zeros((1, 1), dtype=torch.long, device=sampler.device), cache=cache)
    return cache.num_bytes(sampler.model.args.max_seq_len)


def _free_memory(device: "torch.device") -> int:
    import torch

    from canon_pretrain.machine.memory import available_memory

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def _serve(app: Any, scheduler: "Scheduler", listener: socket.socket) -> None:
    """Run the scheduler in a thread and the server in this one, until a signal."""
    import uvicorn

    class Server(uvicorn.Server):
        """A server that stops within seconds: requests that run on are failed."""

        async def shutdown(self, sockets: Any = None) -> None:
            stopping = UserError("serve.stopping", "the server stops: send the request again later")
            timer = asyncio.get_running_loop().call_later(GRACE_S, scheduler.close, stopping)
            await super().shutdown(sockets)
            timer.cancel()
            scheduler.close(stopping)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        # longer than the grace, so that failed requests are answered
        timeout_graceful_shutdown=2 * math.ceil(GRACE_S),
    )
    thread = threading.Thread(target=scheduler.run, name="scheduler", daemon=True)
    thread.start()
    # uvicorn raises the signal again once it has stopped: then SIGTERM ends a server that has done
    # its work, and Ctrl-C a command
    signal.signal(signal.SIGTERM, _exit)
    try:
        asyncio.run(Server(config).serve(sockets=[listener]))
    finally:
        thread.join(GRACE_S)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(0)
