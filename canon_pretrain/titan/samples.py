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
    # data_prep copies it next to the splits
    source = data.sources[0]
    folder = Path(source.folder).parent
    try:
        tokenizer: Tokenizer = Tokenizer.find(folder, eos=source.eos_id)
        if source.tokenizer_sha256 in (None, tokenizer.sha256):
            return tokenizer
        problem = f"{folder} has another tokenizer"
    except UserError as error:
        problem = str(error)
    raise UserError(
        "samples.tokenizer",
        f"samples: {problem}; restore the tokenizer of the shards, or set samples.interval = 0",
        folder=folder,
    )


def read_prompts(job: CanonJobConfig, data: Mixture) -> list[list[int]]:
    """Return the ids of `samples.prompts`, EOS for an empty one; UserError if they do not fit."""
    tokenizer = find_tokenizer(data)
    max_tokens = job.samples.max_tokens
    seq_len = job.training.seq_len
    prompts = [
        tokenizer.encode(text).tolist() or [tokenizer.eos_id] for text in job.samples.prompts
    ]

    # A model with absolute positions, or a window, has been trained up to seq_len only.
    for k, ids in enumerate(prompts):
        if len(ids) + max_tokens - 1 > seq_len:  # the last token is not read
            raise UserError(
                "samples.too_long",
                f"samples.prompts[{k}] has {len(ids)} tokens, with samples.max_tokens = "
                f"{max_tokens} more than training.seq_len = {seq_len}",
                prompt=k,
                num_tokens=len(ids),
            )
    return prompts


class TextSamples:
    """Continuations of a job's prompts, which are token ids; rank 0 decodes them."""

    def __init__(self, job: CanonJobConfig, data: Mixture, prompts: list[list[int]]) -> None:
        self._config = job.samples
        self._last_step = job.last_step
        self._prompts = prompts
        self._eos_id = data.eos_id
        self._vocab_size = data.vocab_size
        self._tokenizer = find_tokenizer(data) if dist.get_rank() == 0 else None

    def is_due(self, step: int) -> bool:
        is_multiple = step % self._config.interval == 0
        return step > 0 and (is_multiple or step == self._last_step)

    def write(self, model: Transformer, step: int) -> dict[str, Any]:
        """Return the fields of the log event, on rank 0 with the samples; collective.

        Texts are empty if the logits are not finite, which is the `reason`.
        """
        if device_type == "cuda":  # so that the running step does not count
            torch.cuda.synchronize()
        begin = time.perf_counter()

        # All ranks generate, because FSDP2 gathers the weights of each block.
        answers: list[list[int]] = [[] for _ in self._prompts]
        fields: dict[str, Any] = {}
        temperature = self._config.temperature
        generators = None
        if temperature:
            generators = [sample_generator(step, k) for k in range(len(self._prompts))]
        model.eval()  # experts drop no tokens
        try:
            # compiled layers would be compiled again for every length
            with record_function(VALIDATION), torch.compiler.set_stance("force_eager"):
                answers = generate(
                    model,
                    self._prompts,
                    max_new_tokens=self._config.max_tokens,
                    eos_id=self._eos_id,
                    temperature=temperature,
                    generator=generators,
                    vocab_size=self._vocab_size,
                )
        except UserError as error:
            if error.code != "generate.logits_not_finite":
                raise
            fields["reason"] = "not finite"
        finally:
            reshard(model)
            model.train()

        # Rank 0 decodes prompt and answer together: SentencePiece drops the space before a
        # text's first word.
        tokenizer = self._tokenizer
        if tokenizer is not None:
            samples = []
            prompts = zip(self._config.prompts, self._prompts, strict=True)
            for (prompt, ids), answer in zip(prompts, answers, strict=True):
                decoded_prompt = tokenizer.decode(ids)
                text = tokenizer.decode(ids + answer)[len(decoded_prompt) :]
                samples.append(
                    {
                        "prompt": prompt,
                        "text": text,
                        "tokens": len(answer),
                    }
                )
            fields["samples"] = samples
        return fields | {"seconds": time.perf_counter() - begin}
