"""datatrove's way from JSONL to token files, as the bench runs it in a process of its own."""

import argparse
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Tokenise --files with --tokenizer into OUT/tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--files", "--tokenizer", "--eos", "--out"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    # not at the top: it is not installed everywhere
    reader = import_module("datatrove.pipeline.readers").JsonlReader(arguments.files)
    writer = import_module("datatrove.pipeline.tokens").DocumentTokenizer(
        f"{arguments.out}/tokens",
        arguments.tokenizer,
        eos_token=arguments.eos,
        save_final_metadata=False,
        shuffle_documents=False,
    )
    executor = import_module("datatrove.executor").LocalPipelineExecutor(
        [reader, writer], tasks=1, workers=1, logging_dir=f"{arguments.out}/logs"
    )
    executor.run()
    Path(arguments.out, "token_size").write_text(str(writer.token_size), encoding="utf-8")


if __name__ == "__main__":
    main()
