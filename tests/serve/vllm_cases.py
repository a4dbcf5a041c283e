"""Run by the Python of vLLM: generate for each case of a JSON list; append a line per answer.

    python vllm_cases.py CASES.json ANSWERS.jsonl

A case has the `options` of vllm.LLM, `prompts` (ids), `num_new` tokens for each, and `rounds`.
"""

import gc
import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

COUNTER = "vllm:num_preemptions"


def main(cases_path: Path, answers_path: Path) -> None:
    for case in json.loads(cases_path.read_text()):
        try:
            answered = answer(**case)
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {error}"}
            answered["code"] = getattr(error, "code", None)
        with open(answers_path, "a") as file:
            file.write(json.dumps(answered) + "\n")


def answer(options, prompts, num_new, rounds):
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **options)
    answered_rounds = []
    for number in range(rounds):
        # tokens of a prompt that are scored are read, not taken from the prefix cache
        scored = 0 if number == 0 else None
        params = SamplingParams(
            temperature=0,
            max_tokens=num_new,
            logprobs=options["max_logprobs"],
            prompt_logprobs=scored,
            detokenize=False,
            ignore_eos=True,
        )
        requests = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        answered_rounds.append([as_json(request) for request in requests])
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    num_preemptions = metrics[COUNTER].value
    del llm
    gc.collect()
    return {"rounds": answered_rounds, "num_preemptions": num_preemptions}


def as_json(request):
    output = request.outputs[0]
    scores = request.prompt_logprobs or []
    return {
        "ids": list(output.token_ids),
        "logprobs": [by_id(scores_of_token) for scores_of_token in output.logprobs],
        "prompt_logprobs": [by_id(scores_of_token) for scores_of_token in scores],
        "num_cached": request.num_cached_tokens,
    }


def by_id(scores):
    return {id_: score.logprob for id_, score in (scores or {}).items()}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
