"""The model that `eval bench` measures, and the harness's own class over its export.

Random weights by default: what a model has learned changes no time.
"""

import io
import logging
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.data.tokenizer import SENTENCEPIECE_FILE
from canon_pretrain.hf.export import export
from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from eval.bench.cases import MAX_LENGTH, library_texts

NO_TEXT = 3 + 256
"""The ids of control pieces and bytes in a tokenizer that SentencePiece has just trained."""


def parse_model(words: str) -> ModelArgs:
    """The args that FLAVOR[,FIELD=VALUE...] names; Canon ABCD without positions by default."""
    name, *settings = words.split(",")
    changes: dict[str, Any] = {"position": "nope", "canon_set": "ABCD"}
    known: dict[str, type] = {f.name: type(f.default) for f in fields(ModelArgs)}
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in known:
            near = nearest(field, known)
            raise UserError(
                f'--model {words}: "{field}" is no field of a model'
                + (f"; did you mean {near}?" if near else "")
            )
        kind = known[field]
        try:
            changes[field] = value == "true" if kind is bool else kind(value)
        except ValueError:
            raise UserError(f'--model {words}: {field} = "{value}" is no {kind.__name__}') from None
    args = replace(flavor(name), **changes)
    return replace(args, max_seq_len=max(args.max_seq_len, MAX_LENGTH))


def describe(args: ModelArgs) -> str:
    """Size and variant in a few words."""
    canon = f"Canon-{args.canon_set}" if args.canon_set else "no Canon"
    return f"{args.num_layers}L{args.dim}D, {args.position}, {canon}"


def write_random_export(args: ModelArgs, folder: Path, dtype: torch.dtype) -> None:
    """The export `folder`/out of a model as it is before training, with a tokenizer of its size.

    Its likeliest token is never EOS, a newline or another byte: answers are of full length, and
    valid text, which both sides decode alike.
    """
    tokenizer = folder / SENTENCEPIECE_FILE
    tokenizer.write_bytes(trained_tokenizer(args.vocab_size))
    model = Transformer(replace(args, tie_embeddings=False))
    model.init_weights()
    assert model.output is not None
    with torch.no_grad():
        model.output.weight[:NO_TEXT] = 0.0  # a logit of 0: many others are above it
    run = RunFolder(folder / "run")
    run.write_config({"data": {}}, {f"model.{k}": v for k, v in asdict(model.args).items()})
    checkpoint = run.path / "checkpoint" / "step-1"
    save_alone(dict(model.named_parameters()), checkpoint, step=1)
    export(checkpoint, folder / "out", dtype=str(dtype).removeprefix("torch."), tokenizer=tokenizer)


def trained_tokenizer(vocab_size: int) -> bytes:
    """A SentencePiece BPE model of the standard library, as data_prep trains one."""
    lines = (line for text in library_texts() for line in text.split("\n") if 0 < len(line) < 4000)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=2,
        minloglevel=2,
    )
    return model.getvalue()


def load_theirs(folder: Path, device: torch.device, dtype: torch.dtype, scratch: Path) -> Any:
    """What `lm_eval --model hf --model_args pretrained=FOLDER,...` makes, without BOS as ours."""
    # where transformers copies the export's code to, by default below the home folder
    os.environ.setdefault("HF_MODULES_CACHE", str(scratch / "modules"))
    import transformers
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return HFLM(
        pretrained=str(folder),
        trust_remote_code=True,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        max_length=MAX_LENGTH,
        max_position_embeddings=MAX_LENGTH,  # of the model, which may have seen shorter texts
        add_bos_token=False,
    )
