"""Few-shot examples of a task that never hold the asked item, whose answer they would show.

lm_eval 0.4.13 leaves the item out only where `fewshot_split` is spelled as `test_split`: not where
few-shot examples fall back to the test split, nor for a task with a validation split only (issue
4145 of lm_eval). Where it does not, prompts are unchanged.
"""

import json
from collections.abc import Sequence
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import handle_non_serializable

from canon_pretrain.core.errors import UserError

Document = dict[str, Any]


def leave_out_asked_item(task: ConfigurableTask) -> None:
    """Make `task` leave each item out of its own few-shot examples. Raises UserError if it can't.

    The examples are drawn as by lm_eval where it passes the asked item to the sampler. Any other
    copy of the item, as in a training split that repeats it, is dropped from the examples drawn.
    """
    shares_split = _fewshot_split(task) == _asked_split(task)
    if shares_split:
        _check_examples_are_asked(task)
    build_context = task.fewshot_context
    draw = task.sampler.sample

    def fewshot_context(item: Document, *args: Any, **kwargs: Any) -> str | list[str]:
        def sample(n: int, eval_doc: Document | None = None, **options: Any) -> Sequence[Document]:
            # the sampler draws one example more if the item is among them, and drops the item
            left_out = item if shares_split else eval_doc
            examples = draw(n, eval_doc=left_out, **options)
            return [example for example in examples if example != item]

        task.sampler.sample = sample
        return build_context(item, *args, **kwargs)

    task.fewshot_context = fewshot_context


def _asked_split(task: ConfigurableTask) -> str | None:
    return task.config.test_split or task.config.validation_split


def _fewshot_split(task: ConfigurableTask) -> str | None:
    """Return the split that few-shot examples are from, as lm_eval selects it; None: a list."""
    config, options = task.config, task.fewshot_cfg
    if options.split is None and options.samples is not None:
        return None
    return options.split or config.training_split or config.validation_split or config.test_split


def _check_examples_are_asked(task: ConfigurableTask) -> None:
    """Raise UserError unless each example of the asked split equals one of the asked items.

    Otherwise, as where a function processes them differently, an item's own example is not
    recognized.
    """
    items = set(map(_content, task.eval_docs))
    if any(_content(example) not in items for example in task.sampler.df):
        split = _asked_split(task)
        raise UserError(
            "eval.fewshot",
            f"{task.config.task}: few-shot examples are from the asked split ({split}), but are "
            "processed differently, so an item's own answer may be in its prompt. Set "
            "fewshot_split to another split, or num_fewshot to 0",
            split=split,
        )


def _content(document: Document) -> str:
    return json.dumps(document, default=handle_non_serializable, sort_keys=True)
