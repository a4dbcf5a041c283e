"""The READMEs: their commands run, and every path, module, option and link in them exists.

The `sh` blocks of a document are one script, run by the system tier in a folder that links to the
repository. A block after `<!-- dry: gpu -->` (or network, slurm, minutes, hours) is not run: its
options go through the real parsers, training through --dry_run, job scripts through `bash -n`.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pydoc_data.topics import topics

import pytest

from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import CanonJobConfig
from tests.support import ROOT

FOLDERS = ("canon_pretrain", "data_prep", "eval", "slurm", "train_configs", "tests")
NAMES = ("README.md", "CONTRIBUTING.md", "canon_pretrain/kernels/README.md")
DOCS = [ROOT / name for name in (*NAMES, *(f"{folder}/README.md" for folder in FOLDERS))]
BLOCK = re.compile(r"(<!-- dry: [a-z ]+ -->\n)?```sh\n(.*?)```", re.DOTALL)
QUICK = {"steps = 300": "steps = 3", "warmup_steps = 30": "warmup_steps = 1"}
"""Makes README.md's own config short: the commands are the same, the model is worse."""
TOOLS = "cp tail source pip pre-commit lm_eval make bash sbatch python torchrun".split()
OTHERS = """--nproc-per-node --nodes --time --cpus-per-task --gpus-per-node --gres --signal --name
--index-url --no-build-isolation --model_args --tasks --include_path --metadata --model --help
--section.key --model.KEY --help-all --additional-suffix""".split()
"""Options of other tools, and placeholders."""
named = pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))


def blocks(doc, *, dry):
    return [body for mark, body in BLOCK.findall(doc.read_text()) if bool(mark) == dry]


def dry_commands():
    """Yield the words of each command that is not run."""
    for line in "".join(body for doc in DOCS for body in blocks(doc, dry=True)).splitlines():
        for command in re.split("&&|;", line.partition(" #")[0]):
            if words := shlex.split(command, comments=True):
                yield words


def code(doc):
    """The text in backticks and in `sh` blocks."""
    text = doc.read_text()
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*inline, *(body for _, body in BLOCK.findall(text))])


@functools.cache
def options():
    """The options that product code and job scripts mention."""
    files = (path for name in FOLDERS[:4] for path in (ROOT / name).rglob("*.*"))
    text = "\n".join(path.read_text() for path in files if path.suffix in (".py", ".sh"))
    return {option.replace("_", "-") for option in re.findall(r"--[a-z][\w-]*", text)}


def fields(cls, prefix=""):
    """The names of all config keys."""
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        inner = field.default_factory
        if dataclasses.is_dataclass(inner):
            yield from fields(inner, f"{prefix}{field.name}.")


KEYS = set(fields(CanonJobConfig))


@named
def test_links_resolve(doc):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", doc.read_text()):
        path, _, anchor = target.partition("#")
        page = doc.parent / path if path else doc
        assert page.is_file(), target
        heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not anchor or anchor in slugs, target


@named
def test_paths_exist(doc):
    for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*-]*", code(doc)):
        # a placeholder such as NAME; a user's own file; a name that goes on with braces
        if not re.search(r"\b[A-Z]+\b(?!\.md)|cluster\.env$|[-_]$", path):
            assert path.endswith("/") or any(ROOT.glob(path)), path
            assert (ROOT / path).is_dir() or not path.endswith("/"), path


@named
def test_modules_exist(doc):
    for name in re.findall(r"-m ([a-z_]\w+(?:\.\w+)*)", code(doc)):
        assert name in ("system", "gpu", "slurm") or importlib.util.find_spec(name), name


@named
def test_options_exist(doc):
    for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*[\w]", code(doc)):
        key = option[2:].replace("-", "_").replace(".no_", ".")
        assert option.replace("_", "-") in options() or key in KEYS or option in OTHERS, option
    sections = "|".join({key.partition(".")[0] for key in KEYS if "." in key} - {"data"})
    for key in re.findall(rf"(?<![\w./-])(?:{sections}|data)\.[a-z_]+\b(?![./(])", code(doc)):
        assert key in KEYS or key.endswith((".json", ".py", ".toml", ".id", "_")), key


@pytest.mark.system
def test_dry_commands_parse(monkeypatch, tmp_path):
    """Each option is known to the real parser, and has a value that it takes."""

    class Parsed(Exception):
        pass

    def parse(parser, *args, real=argparse.ArgumentParser.parse_args):
        real(parser, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for words in dry_commands():
        tool, *rest = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        assert tool in TOOLS, words
        if tool == "make":
            assert f"\n{rest[0]}: " in (ROOT / "Makefile").read_text()
        scripts = [word for word in rest if word.endswith(".sh")]
        for script in scripts:
            subprocess.run(["bash", "-n", ROOT / script], check=True)
        module, *options = rest[rest.index("-m") + 1 :] if "-m" in rest else ["", *rest]
        if scripts and scripts[-1].endswith("pretrain_1b3.sh"):
            config, *options = rest[rest.index(scripts[-1]) + 1 :]
            parse_job(["--config", str(ROOT / config), *options])
        elif scripts and "--" in rest:
            module, options = "data_prep", ["build", *rest[rest.index("--") + 1 :]]
        if module.partition(".")[0] in FOLDERS[:3] and not module.endswith((".train", ".bench")):
            place = importlib.util.find_spec(module)
            package = place is not None and place.submodule_search_locations
            main = importlib.import_module(f"{module}.__main__" if package else module).main
            with pytest.raises(Parsed):
                main(options)


def run(script, folder, **environment):
    """Run `script` in `folder`, which links to the repository's folders."""
    for name in FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    home = {"HF_HOME": str(folder / "hf"), "PATH": path, "PYTHONPATH": str(folder)}
    settings = os.environ | home | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder, env=settings | environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert not done.returncode, f"{done.stdout}\n{done.stderr}"


@pytest.mark.system
@pytest.mark.parametrize("doc", [doc for doc in DOCS if blocks(doc, dry=False)], ids=str)
def test_commands_run(doc, tmp_path):
    texts = [part for text in topics.values() for part in text.split("\n\n\n") if part.strip()]
    (tmp_path / "mytext").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "mytext" / f"{i}.txt").write_text(text)
    script = "\n".join(blocks(doc, dry=False))
    for long, short in QUICK.items():
        assert (doc != ROOT / "README.md") or long in script
        script = script.replace(long, short)
    run(script, tmp_path)


@pytest.mark.system
def test_dry_training(tmp_path):
    trained = [shlex.join(words) for words in dry_commands() if "canon_pretrain.train" in words]
    short = {re.sub(r".*canon_pretrain\.train", "", words) for words in trained}
    lines = [f"python -m canon_pretrain.train {words} --dry_run" for words in sorted(short)]
    assert lines
    run("\n".join(lines), tmp_path)
