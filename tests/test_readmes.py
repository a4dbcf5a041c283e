"""The READMEs: their commands run, and every path, module, option and link in them exists.

A document's `sh` blocks are one script, which the system tier runs in a copy of the repository
(QUICK shortens README.md's training; `canon` runs in forks of a server). After `<!-- dry: gpu -->`
(or network, slurm, minutes, hours) options go through the real parsers, training through its plan,
jobs bash -n.
"""

import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pydoc_data.topics import topics

import pytest

from canon_pretrain import commands, quickstart
from canon_pretrain.__main__ import main
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import make_plans
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.train import _split_options
from tests.commands import canon_program
from tests.support import ROOT

FOLDERS = ("canon_pretrain", "data_prep", "eval", "slurm", "train_configs", "tests")
ROOMS = sorted((ROOT / "canon_pretrain").glob("*/README.md"))
NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"{folder}/README.md" for folder in FOLDERS),
    *(str(path.relative_to(ROOT)) for path in ROOMS),
)
DOCS = {name: ROOT / name for name in NAMES}
BLOCK = re.compile(r"(<!-- dry: [a-z ]+ -->\n)?```sh\n(.*?)```", re.DOTALL)
STEPS = "--training.steps 3 --lr_scheduler.warmup_steps 1"
QUICK = {"canon train --config mine.toml": f"canon train --config mine.toml {STEPS}"}
OTHER_TOOLS = """--nproc-per-node --nodes --time --cpus-per-task --gpus-per-node --gres --signal
--name --index-url --no-build-isolation --model_args --tasks --include_path --metadata --model
--help --section.key --model.KEY --additional-suffix --force-reinstall --no-deps --enforce-eager
--trust-remote-code --kv-cache-memory-bytes""".split()
of_every_document = pytest.mark.parametrize("name", DOCS)


def blocks(name, *, dry):
    """Return the text of a document's `sh` blocks that are marked as dry, or that are not."""
    marked_blocks = BLOCK.findall(DOCS[name].read_text())
    return "".join(body for mark, body in marked_blocks if bool(mark) == dry)


def dry_commands():
    """Yield the words of each command in dry blocks."""
    for line in "".join(blocks(name, dry=True) for name in DOCS).splitlines():
        for command in re.split("&&|;", line.partition(" #")[0]):
            if words := shlex.split(command, comments=True):
                yield words


def code(name):
    """Return the code of a document: inline, and its `sh` blocks."""
    text = DOCS[name].read_text()
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", without_blocks)
    return "\n".join([*inline, blocks(name, dry=True), blocks(name, dry=False)])


def keys(cls, prefix=""):
    """Yield the dotted names of the fields of a config class."""
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        if dataclasses.is_dataclass(field.default_factory):
            yield from keys(field.default_factory, f"{prefix}{field.name}.")


FILES = [path for folder in FOLDERS[:4] for path in (ROOT / folder).rglob("*.[ps][yh]")]
FILES += [ROOT / "tests" / "gpu" / "first.sh"]
MENTIONED = {option for path in FILES for option in re.findall(r"--[a-z][\w-]*", path.read_text())}
OPTIONS = {option.replace("_", "-") for option in MENTIONED}
KEYS = set(keys(CanonJobConfig))
SECTIONS = "|".join({key.partition(".")[0] for key in KEYS if "." in key})


def test_every_room_has_a_readme_with_a_line_per_file():
    for folder in (ROOT / "canon_pretrain").iterdir():
        files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        readme = folder / "README.md"
        assert readme.exists() or len(files) <= 5, folder
        if readme.exists():
            text = readme.read_text()
            assert not [name for name in files if name not in text], folder


def anchors_of(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@of_every_document
def test_links_resolve(name):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", DOCS[name].read_text()):
        path, _, anchor = target.partition("#")
        page = DOCS[name].parent / path if path else DOCS[name]
        assert page.is_file(), target
        assert not anchor or anchor in anchors_of(page), target


@of_every_document
def test_paths_exist(name):
    for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*-]*", code(name)):
        # but for a placeholder such as NAME, a user's own file, a name that goes on with braces
        if re.search(r"\b[A-Z]+\b(?!\.md)|cluster\.env$|[-_]$", path):
            continue
        if path.endswith("/"):
            assert (ROOT / path).is_dir(), path
        else:
            assert any(ROOT.glob(path)), path


@of_every_document
def test_modules_and_stages_exist(name):
    for module in re.findall(r"-m ([a-z_]\w+(?:\.\w+)*)", code(name)):
        assert module in ("system", "gpu", "slurm") or importlib.util.find_spec(module), module
    for stage in re.findall(r"(?<![\w./-])canon ([a-z]+)", code(name)):
        assert stage in commands.COMMANDS, stage


@of_every_document
def test_options_and_config_keys_exist(name):
    for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*[\w]", code(name)):
        key = option[2:].replace("-", "_").replace(".no_", ".")
        key = re.sub(r"groups\.\d+\..*", "groups", key)  # of a table
        assert option.replace("_", "-") in OPTIONS or key in KEYS or option in OTHER_TOOLS, option
    for key in re.findall(rf"(?<![\w./-])(?:{SECTIONS})\.[a-z_]+\b(?![./(])", code(name)):
        assert key in KEYS or key.endswith((".json", ".py", ".toml", ".id", "_")), key


def test_the_quickstart_and_its_toml_agree():
    job = tomllib.loads((ROOT / quickstart.CONFIG).read_text())
    assert job["job"]["dump_folder"] == f"{quickstart.FOLDER}/run"
    assert job["data"]["path"] == f"{quickstart.FOLDER}/data"
    assert f"train:{job['model']['vocab_size']}" in quickstart.BUILD
    assert 2 * job["checkpoint"]["interval"] == job["training"]["steps"]


def canon_words(tool, rest, scripts):
    """Return the words of the `canon` command that a command runs, [] if none."""
    if scripts and "--" in rest:
        return ["data", "build", *rest[rest.index("--") + 1 :]]
    if "-m" in rest and rest[rest.index("-m") + 1] == "canon_pretrain.train":
        return ["train", *rest[rest.index("-m") + 2 :]]
    return rest if tool == "canon" else []


@pytest.mark.system
def test_dry_commands_parse(monkeypatch):
    def parsed(arguments):
        raise EOFError  # and no further

    def functions_of(name, chosen, real=commands.functions_of):
        return (real(name, chosen)[0], parsed)

    monkeypatch.setattr(commands, "functions_of", functions_of)
    targets = (ROOT / "Makefile").read_text()

    for words in dry_commands():
        tool, *rest = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if tool == "make":
            assert f"\n{rest[0]}: " in targets, words

        scripts = [word for word in rest if word.endswith(".sh")]
        for script in scripts:
            subprocess.run(["bash", "-n", ROOT / script], check=True)

        if scripts and scripts[-1].endswith("pretrain_1b3.sh"):
            config, *options = rest[rest.index(scripts[-1]) + 1 :]
            parse_job(["--config", str(ROOT / config), *options])
            continue

        stage = canon_words(tool, rest, scripts)
        if stage[:1] == ["train"]:
            options, job_words = _split_options([*stage[1:], "--dry-run"])
            make_plans(parse_job(job_words), options.gpu, options.world, options.mfu, 1)
        elif stage:
            with pytest.raises(EOFError):
                main(stage)


@pytest.mark.system
@pytest.mark.parametrize("name", [name for name in DOCS if blocks(name, dry=False)])
def test_commands_run(name, tmp_path):
    # a copy of the repository, with a text of the user
    for folder in FOLDERS[:5]:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "mytext").mkdir()
    for i, text in enumerate("".join(topics.values()).split("\n\n\n")):
        (tmp_path / "mytext" / f"{i}.txt").write_text(text or "-")

    script = blocks(name, dry=False)
    for long, short in QUICK.items():
        assert name != "README.md" or long in script
        script = script.replace(long, short)
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": f"{tmp_path}/hf",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{tmp_path / 'bin'}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }

    with canon_program(tmp_path / "bin"):
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
        )

    assert not done.returncode, f"{done.stdout}\n{done.stderr}"
