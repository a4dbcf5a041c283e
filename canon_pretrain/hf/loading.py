"""Load a checkpoint or an export outside of training: its path, model and tokenizer."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.checkpoint import architecture
from canon_pretrain.checkpoint.weights import check_checkpoint, read_weights
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.data.id_tokenizer import id_tokenizer
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from canon_pretrain.hf.reading import CONFIG, folder_args, folder_weights, is_folder
from canon_pretrain.machine.hardware import cpu_info
from canon_pretrain.model.transformer import Head, Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.synthetic.evaluation import task_of_run

USE_TOKENIZER = "Use --tokenizer PATH"


def locate(path: Path) -> tuple[Path, RunFolder | None]:
    """Return the checkpoint that `path` names and its run, or an exported folder and None."""
    if is_folder(path):
        return path, None
    return architecture.find_checkpoint(path)


def run_data(run: RunFolder) -> tuple[Path, TokenShards | None]:
    """Return the first folder of a run's data, or an import, and its shards if they are there."""
    data = run.read_config().get("config", {}).get("data", {})
    paths = data.get("paths") or [data.get("path")]
    if not paths[0]:
        return run.path, None  # an import contains its tokenizer

    folder = Path(paths[0])
    try:
        return folder, TokenShards.open(folder / "train")
    except UserError:
        return folder, None


def find_tokenizer(
    checkpoint: Path,
    run: RunFolder | None,
    path: Path | None = None,
    eos: str | None = None,
    hint: str = USE_TOKENIZER,
) -> Tokenizer:
    """Return the tokenizer of a checkpoint of `run`, or of an export (`run` is None).

    `path`, a file or folder, replaces that of the data; `eos` names EOS if nothing else does. A
    run on a task has the tokenizer of ids. Raises UserError, ending with `hint`, if it is missing
    or not that of the run's shards.
    """
    # Where the tokenizer is, and the id of EOS if the export or the run records it.
    shards: TokenShards | None = None
    eos_id: Any = None
    if run is None:
        folder = checkpoint
        eos_id = read_json(checkpoint / CONFIG, finite=False).get("eos_token_id")
        if isinstance(eos_id, list) and eos_id:
            eos_id = eos_id[0]
    else:
        identity = run.read_config()["identity"]
        args = architecture.model_args(identity, run.config_file)
        if path is None and (task := task_of_run(identity)):
            return Tokenizer(id_tokenizer(task.vocab_size), "of the task")
        folder, shards = run_data(run)
        if shards is None and path is not None:  # the data may have moved there
            with contextlib.suppress(UserError):
                shards = TokenShards.open(path / "train")
        if shards:
            eos_id = shards.eos_id
        elif args.document_mask:
            eos_id = args.eos_id

    source = path or folder
    try:
        tokenizer = load_tokenizer(source, eos=eos if eos_id is None else eos_id)
    except UserError as error:
        raise UserError("hf.no_tokenizer", f"no tokenizer: {error}. {hint}") from None

    # Another tokenizer than that of the shards would read other ids.
    if shards and shards.tokenizer_sha256 not in (None, tokenizer.sha256):
        expected = shards.tokenizer_sha256
        if path is not None and hint == USE_TOKENIZER:
            hint = f"Without --tokenizer, that of {folder} is used"
        raise UserError(
            "hf.other_tokenizer",
            f"the tokenizer of {source} is not that of the run's data "
            f"(SHA-256 {tokenizer.sha256[:16]}, not {expected[:16]}). {hint}",
            given=tokenizer.sha256,
            expected=expected,
        )
    return tokenizer


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype `name`; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def load_model(
    path: Path,
    device: torch.device,
    max_length: int = 0,
    dtype: torch.dtype = torch.float32,
    run: RunFolder | None = None,
) -> Transformer:
    """Return the model of RUN/checkpoint/step-N or of an exported folder, in eval mode.

    It reads up to `max_length` tokens, or its max_seq_len if that is more.
    """
    is_exported = is_folder(path)
    if is_exported:
        args = folder_args(path)
    else:
        check_checkpoint(path)
        args = architecture.model_args_of(run or architecture.run_of_checkpoint(path))

    # The model is without memory at first, so that only one copy of the weights is on `device`.
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=max(args.max_seq_len, max_length)))
    if is_exported:
        weights = folder_weights(path, args)
    else:
        weights = read_weights(path, dict(model.state_dict()))

    # Memory, and the weights, which are converted to `dtype`.
    model.to(dtype)
    model.to_empty(device=device)
    model.reset_ropes(device)
    model.load_state_dict(weights)

    if is_faster(model):
        use_fast_linear(model)
    return model.eval()


def load_transformers(
    export: Path, device: torch.device
) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Load an export by transformers; return its greedy generation in float32.

    It takes prompts of one length and the number of tokens of an answer. The export's own code is
    run, which `canon hf export` wrote.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(str(export), trust_remote_code=True, dtype=torch.float32)
    model = loaded.to(device).eval()

    def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        prompts_BT = torch.tensor(prompts, device=device)
        answers_BT = model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
        )
        return answers_BT[:, prompts_BT.shape[1] :].tolist()

    return generate


ROW_WEIGHTS = 1 << 20
"""Below, torch's linear is faster for one row: the other operator takes 13 us more per call."""


class FastLinear(nn.Linear):
    """A forward-only `nn.Linear` for float32 on AMD, where torch's MKL path is twice as slow."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        is_small_row = x.numel() == self.in_features and self.weight.numel() < ROW_WEIGHTS
        is_float32 = self.weight.dtype == torch.float32  # unless converted since it was loaded
        if torch.is_grad_enabled() or is_small_row or not is_float32:
            return F.linear(x, self.weight, self.bias)
        # torch.compile's replacement of a linear layer, for the weight in its stored layout
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def use_fast_linear(model: Transformer) -> None:
    """Replace every linear layer of `model`, and its output, by a FastLinear of equal weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Head):
                setattr(module, name, FastLinear(child.weight, child.bias))  # type: ignore[arg-type]
    if model.output is None:  # tied to the embedding
        model.output = FastLinear(model.tok_embeddings.get_parameter("weight"))


def is_faster(model: Transformer) -> bool:
    """Return whether FastLinear suits this model and machine; the same on all ranks of a job."""
    weight = model.tok_embeddings.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return torch.backends.mkldnn.is_available() and cpu_info("vendor_id") == "AuthenticAMD"
