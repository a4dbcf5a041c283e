"""The Babilong tasks' documents and score, for the YAML files beside it (spec/eval.md section 3).

Staged rows (eval/staging) and prompts (prompts.py) become documents; score.py judges answers.
"""

from typing import Any

import datasets

from canon_pretrain.core.errors import UserError
from eval.staging.staged import load_staged
from eval.task_length import check_fit
from eval.tasks.babilong.prompts import read_prompts
from eval.tasks.babilong.score import LABELS, is_right

ANSWER_TOKENS = 20
"""Of the greedy answer; `max_gen_toks` in _base.yaml."""


def load(
    *, qa: str, context: str, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """The split `test` of the task `qa` at length `context` ("4k"): lm_eval's `custom_dataset`.

    A document has the whole `prompt`, the `question` and the `target`, the `task`, and the SHA-256
    of the `prompts` that it was made with. Metadata: `staged`; `babilong_prompts`, "lm_eval" or a
    file (prompts.read_prompts); `max_length`, `tokenizer` and `pretrained` to check that prompts
    fit. Raises UserError if one of these does not serve, or a row is none of the task's.
    """
    given = metadata.get("babilong_prompts")
    prompts = read_prompts(qa, given or None)
    key = f"babilong_{qa}_{context}"
    documents = []
    for place, row in enumerate(load_staged(key, staged)[qa]):
        # the question's last space is in the paper's prompts too
        question, target = row["question"], row["target"].strip()
        if target.lower() not in {label.lower() for label in LABELS[qa]}:
            raise UserError(
                f"{key}, row {place}: the target {target!r} is none of {', '.join(LABELS[qa])}: "
                "this is not the data set that the task is about"
            )
        documents.append(
            {
                "task": qa,
                "prompt": prompts.of(row["input"], question),
                "question": question,
                "target": target,
                "prompts": prompts.sha256,
            }
        )
    texts = (document["prompt"] for document in documents)
    check_fit(key, texts, answer_tokens=ANSWER_TOKENS, metadata=metadata)
    return {"test": datasets.Dataset.from_list(documents)}


def score(document: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """The metric `acc` of one document: lm_eval's `process_results`."""
    right = is_right(document["task"], document["question"], document["target"], answers[0])
    return {"acc": float(right)}
