"""Texts that the model writes while training: the section `[samples]`, the log's event `samples`.

All ranks write the same texts: a sharded model must write them together. What is drawn after prompt
k at a step depends on k and the step alone, so that runs can be compared.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torchtitan.tools.utils import device_type

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.model.decode import generate, sample_generator
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import VALIDATION
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.parallelize import reshard


def find_tokenizer(data: Mixture) -> Tokenizer:
    """Return the tokenizer of the shards, from the first folder. Raises UserError."""
    source = data.sources[0]
    folder = Path(source.folder).parent
    try:
        found: Tokenizer | None = Tokenizer.find(folder, eos=source.eos_id)
        text = f"{folder} has another tokenizer"
    except UserError as error:
        found, text = None, str(error)
    if found is None or source.tokenizer_sha256 not in (None, found.sha256):
        raise UserError(
            "samples.tokenizer",
            f"samples: {text}; restore the tokenizer of the shards, or set samples.interval = 0",
            folder=folder,
        )
    return found


def read_prompts(job: CanonJobConfig, data: Mixture) -> list[list[int]]:
    """Return the ids of `samples.prompts`, EOS for an empty one; UserError if they do not fit."""
    tokenizer, config, length = find_tokenizer(data), job.samples, job.training.seq_len
    prompts = [tokenizer.encode(text).tolist() or [tokenizer.eos_id] for text in config.prompts]
    for k, ids in enumerate(prompts):
        if len(ids) + config.max_tokens - 1 > length:  # the last token is not read
            raise UserError(
                "samples.too_long",
                f"samples.prompts[{k}] has {len(ids)} tokens, with samples.max_tokens = "
                f"{config.max_tokens} more than training.seq_len = {length}",
                prompt=k,
                num_tokens=len(ids),
            )
    return prompts


class TextSamples:
    """Continuations of a job's prompts, given as ids; rank 0 decodes them."""

    def __init__(self, job: CanonJobConfig, data: Mixture, prompts: list[list[int]]) -> None:
        self._config, self._last_step = job.samples, job.last_step
        self._prompts, self._eos_id, self._vocab_size = prompts, data.eos_id, data.vocab_size
        self._tokenizer = find_tokenizer(data) if dist.get_rank() == 0 else None

    def is_due(self, step: int) -> bool:
        return step > 0 and (step % self._config.interval == 0 or step == self._last_step)

    def write(self, model: Transformer, step: int) -> dict[str, Any]:
        """Return the fields of the log event, on rank 0 with the samples; collective.

        Texts are empty if the logits are not finite, which is the `reason`.
        """
        if device_type == "cuda":  # so that the running step does not count
            torch.cuda.synchronize()
        begin, temperature = time.perf_counter(), self._config.temperature
        answers: list[list[int]] = [[] for _ in self._prompts]
        fields: dict[str, Any] = {}
        model.eval()  # experts drop no tokens
        try:
            # compiled layers would be compiled again for every length
            with record_function(VALIDATION), torch.compiler.set_stance("force_eager"):
                answers = generate(
                    model,
                    self._prompts,
                    max_new_tokens=self._config.max_tokens,
                    eos_id=self._eos_id,
                    # the likeliest token is drawn from one: `sample` checks the logits
                    temperature=temperature or 1.0,
                    top_k=0 if temperature else 1,
                    generator=[sample_generator(step, k) for k in range(len(self._prompts))],
                    vocab_size=self._vocab_size,
                )
        except UserError as error:
            if error.code != "generate.logits_not_finite":
                raise
            fields["reason"] = "not finite"
        finally:
            reshard(model)
            model.train()
        if (tokenizer := self._tokenizer) is not None:
            fields["samples"] = []
            for prompt, ids, own in zip(self._config.prompts, self._prompts, answers, strict=True):
                # SentencePiece drops the space before a text's first word
                text = tokenizer.decode(ids + own)[len(tokenizer.decode(ids)) :]
                fields["samples"].append({"prompt": prompt, "text": text, "tokens": len(own)})
        return fields | {"seconds": time.perf_counter() - begin}
