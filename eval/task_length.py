"""Whether a task's prompts fit the model that will be asked, before it is asked anything.

A harness cuts the beginning off a prompt that is too long, without a word: the facts of a question
are then gone and it cannot be answered. Tasks that hide facts in a long context call `check_fit`
when their documents are made. No torch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from eval.task_tokenizer import task_tokenizer

# the names under which lm_eval looks a model's length up, in its order
POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")


def known_max_length(metadata: Mapping[str, Any]) -> int | None:
    """The tokens that the model reads at most, as far as a task is told; None where it is not.

    That is the metadata `max_length`, or the model's own name for it (both are arguments of the
    model under plain lm_eval), else what the config.json of the folder `pretrained` says. Raises
    UserError for a length that is no number.
    """
    for name in ("max_length", *POSITIONS):
        if (given := metadata.get(name)) is not None:
            try:
                return int(given)
            except (TypeError, ValueError):
                raise UserError(f"{name} {given!r}: expected a number of tokens") from None
    try:
        config = json.loads((Path(str(metadata.get("pretrained"))) / "config.json").read_text())
        lengths = [config[name] for name in POSITIONS if config.get(name) is not None]
        return int(lengths[0])
    except (OSError, ValueError, TypeError, AttributeError, IndexError):
        return None  # no exported folder: the name of a model on the hub, or none


def check_fit(
    name: str, prompts: Iterable[str], *, answer_tokens: int, metadata: Mapping[str, Any]
) -> None:
    """Raise UserError if a prompt and `answer_tokens` more do not fit the model's length.

    Where the length is not known nothing is checked; where it is, the tokenizer must be.
    """
    max_length = known_max_length(metadata)
    if max_length is None:
        return
    room = max_length - answer_tokens
    # a token is a letter at least, and one may be put before the text: what is short needs no count
    # (beyond ASCII, normalisation makes several letters of one)
    long = [prompt for prompt in prompts if len(prompt) + 1 > room or not prompt.isascii()]
    if not long:
        return
    tokenizer = task_tokenizer(metadata)
    longest = max(len(tokenizer.encode(prompt)) for prompt in long)
    if longest > room:
        raise too_long(name, longest, answer_tokens, max_length)


def too_long(name: str, longest: int, answer_tokens: int, max_length: int) -> UserError:
    """What is said of prompts that do not fit."""
    return UserError(
        f"{name}: prompts of up to {longest} tokens and an answer of {answer_tokens} do not fit "
        f"max_length {max_length}, and a prompt that is cut has lost facts. Give the model at "
        f"least {longest + answer_tokens} (python -m eval run: --max_length N; lm_eval --model "
        "hf: --model_args ...,max_length=N,max_position_embeddings=N), or leave the task out"
    )
