"""The Babilong tasks' documents and score, for the YAML files beside it (spec/eval.md section 3).

Staged rows (eval/staging) and prompts (prompts.py) become documents; `is_right` judges answers.
Answers that list every place, or that repeat the question's, are not right; the harness's own
`babilong` (target occurs in the answer) calls them so.
"""

from typing import Any

import datasets

from canon_pretrain.core.errors import UserError
from eval.staging.staged import load_staged
from eval.task_tokenizer import check_fit
from eval.tasks.babilong.prompts import read_prompts

ANSWER_TOKENS = 20
"""Of the greedy answer; `max_gen_toks` in _base.yaml."""
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
GIVING = ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk")
LABELS = {"qa1": PLACES, "qa2": PLACES, "qa3": PLACES, "qa4": PLACES, "qa5": GIVING}
ENDS = (".", "<context>", "<example>")
"""What an answer ends before: its sentence, or a further example that the model makes up."""


def load(
    *, qa: str, context: str, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the split `test` of `qa` at length `context` ("4k"): lm_eval's `custom_dataset`.

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
    """Return the metric `acc` of one document: lm_eval's `process_results`."""
    right = is_right(document["task"], document["question"], document["target"], answers[0])
    return {"acc": float(right)}


def is_right(task: str, question: str, target: str, answer: str) -> bool:
    """Return whether the labels that only the answer names are exactly the target.

    Case is ignored. A label is named if it occurs in the text ("bedrooms" names the bedroom, and
    "billion" names Bill), in the question as in the answer.
    """
    answer, question = answer.lower(), question.lower()
    for end in ENDS:
        answer = answer.partition(end)[0]
    labels = {label.lower() for label in LABELS[task]}
    named = {label for label in labels if label in answer and label not in question}
    return named == {target.lower()}
