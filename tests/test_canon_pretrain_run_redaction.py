"""Secrets are kept out of what is written down, and what is none of them is kept in."""

import time
from typing import Any

import pytest

from canon_pretrain.run.redaction import (
    REDACTED,
    is_secret_name,
    publishable,
    redact_arguments,
    redact_config,
    redact_environment,
    redact_source,
    redact_text,
    scrub,
    secret_values,
)

PLANTED = "pl4nted-Sup3r"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "WANDB_API_KEY",
            "HF_TOKEN",
            "--x.api_key",
            "AWS_SECRET_ACCESS_KEY",
            "password",
            "SSH_KEY",
        ),
        *("SLURM_JWT", "MYSQL_PWD", "auth", "GOOGLE_CREDENTIALS", "cookie", "passphrase", "Token"),
    ],
)
def test_names_that_tell_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["PWD", "OLDPWD", "--model.tokenizer_path", "TOKENIZERS_PARALLELISM", "author", "lr"]
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--x.api_key", PLANTED, "--lr", "1"], ["--x.api_key", REDACTED, "--lr", "1"]),
        ([f"--x.api-key={PLANTED}", "a"], [f"--x.api-key={REDACTED}", "a"]),
        (["--keys", PLANTED, PLANTED, "--b", "c"], ["--keys", REDACTED, REDACTED, "--b", "c"]),
        (["--password", f"-{PLANTED}", "--b"], ["--password", REDACTED, "--b"]),
        (["--token", "--b", "c"], ["--token", "--b", "c"]),
        (
            ["env", f"WANDB_API_KEY={PLANTED}", "python"],
            ["env", f"WANDB_API_KEY={REDACTED}", "python"],
        ),
        (["--from", f"https://me:{PLANTED}@host/x"], ["--from", f"https://{REDACTED}@host/x"]),
        ([f"--from=s3://me:{PLANTED}@host"], [f"--from=s3://{REDACTED}@host"]),
        (["--model.tokenizer_path", "a/b"], ["--model.tokenizer_path", "a/b"]),
        (["--data.path=key/x", "--lr=2"], ["--data.path=key/x", "--lr=2"]),
        ([], []),
    ],
)
def test_arguments(given: list[str], kept: list[str]) -> None:
    assert redact_arguments(given) == kept
    assert redact_arguments(kept) == kept, "a second time changes nothing"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"https://{PLANTED}@github.com/x.git", f"https://{REDACTED}@github.com/x.git"),
        ("ssh://git@github.com/x.git", "ssh://git@github.com/x.git"),
        ("git@github.com:x.git", "git@github.com:x.git"),
        (f"https://h/x?api_key={PLANTED}&lr=2", f"https://h/x?api_key={REDACTED}&lr=2"),
        (f"see hf_{'aB3' * 11} there", f"see {REDACTED} there"),
        (f"ghp_{'aB3' * 12}", REDACTED),
        ("AKIA" + "A1" * 8, REDACTED),
        (f"Authorization: Bearer {PLANTED}", f"Authorization: Bearer {REDACTED}"),
        ("hf_model_name and sk-learn", "hf_model_name and sk-learn"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
    ],
)
def test_texts(given: str, kept: str) -> None:
    assert redact_text(given) == kept


def test_a_configuration_keeps_its_shape_and_its_numbers() -> None:
    config: dict[str, Any] = {
        "a": {"api_key": PLANTED, "max_tokens": 7, "use_token": True, "key": None, "secret": ""},
        "tokens": {"deep": [PLANTED, 3]},
        "urls": (f"https://u:{PLANTED}@h", "plain"),
        "lr": 0.1,
    }
    assert redact_config(config) == {
        "a": {"api_key": REDACTED, "max_tokens": 7, "use_token": True, "key": None, "secret": ""},
        "tokens": {"deep": [REDACTED, 3]},
        "urls": (f"https://{REDACTED}@h", "plain"),
        "lr": 0.1,
    }
    assert config["a"]["api_key"] == PLANTED, "a copy is changed, not what was given"
    environ = {"MY_TOKEN": PLANTED, "PLAIN": "plain"}
    assert publishable({"a": {"text": f"x{PLANTED}y plain"}}, environ) == {
        "a": {"text": f"x{REDACTED}y plain"}
    }


def test_the_environment_is_an_allow_list() -> None:
    kept = redact_environment(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JWT": PLANTED,
            "NCCL_DEBUG": "INFO",
            "NCCL_SECRET": PLANTED,
            "CUDA_VISIBLE_DEVICES": "0,1",
            "OMP_NUM_THREADS": "4",
            "TORCH_URL": f"https://u:{PLANTED}@h",
            "TORCH_LOGS": "password=x",
            "HOME": "/home/me",
            "WANDB_API_KEY": PLANTED,
            "WANDB_MODE": "offline",
        }
    )
    assert kept == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_SECRET": REDACTED,
        "OMP_NUM_THREADS": "4",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": REDACTED,
        "TORCH_LOGS": REDACTED,
        "TORCH_URL": f"https://{REDACTED}@h",
        "WANDB_MODE": "offline",
    }
    assert list(kept) == sorted(kept)


def test_values_of_secrets_are_found_anywhere() -> None:
    environ = {
        "A_TOKEN": PLANTED,
        "B_KEY": f"{PLANTED}-longer",
        "C_KEY": "short",
        "HOME": "/home/me",
    }
    environ |= {"SSH_AUTH_SOCK": "/proc/self/cmdline", "PWD": "/home/me/work"}
    arguments = ["--x.password", "0ther-planted", "--y", "not-a-secret", "--z_key=third-planted"]
    secrets = secret_values(environ, arguments)
    assert secrets == [f"{PLANTED}-longer", "0ther-planted", PLANTED, "third-planted"]
    text = {"a": [f"<{PLANTED}-longer>", ("0ther-planted", 3)], "b": PLANTED, "c": "/home/me/work"}
    assert scrub(text, secrets) == {
        "a": [f"<{REDACTED}>", (REDACTED, 3)],
        "b": REDACTED,
        "c": "/home/me/work",
    }


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ('+    api_key = "aB3dE5gH7jK9mN1pQ3"', "aB3dE5gH7jK9mN1pQ3"),
        ("+PASSWORD = 'hunter2'", "hunter2"),
        ('+  "secret": "opensesame",', "opensesame"),
        ("+WANDB_API_KEY=0123456789abcdef0123", "0123456789abcdef0123"),
        ("+  token: 0123456789abcdef0123", "0123456789abcdef0123"),
        (f"+x = 'hf_{'aB3' * 11}'", f"hf_{'aB3' * 11}"),
    ],
)
def test_secrets_in_source(line: str, hidden: str) -> None:
    found, count = redact_source(f" before\n{line}\n after\n")
    assert hidden not in found and count == 1
    assert found == f" before\n{line.replace(hidden, REDACTED)}\n after\n"


@pytest.mark.parametrize(
    "line",
    [
        '+    key = "learning_rate"',
        '+eos_token = "<|endoftext|>"',
        "+    for key, value in items.items():",
        "+    token = tokenizer.encode(text)[0]",
        "+password = getpass.getpass()",
        "+    cache_key: str = digest",
        "+max_tokens = 4096",
    ],
)
def test_code_that_holds_no_secret_is_left_alone(line: str) -> None:
    assert redact_source(line) == (line, 0)


@pytest.mark.parametrize("text", ["key" * 100_000, "a.b-" * 75_000, "?" * 300_000, "x://" * 75_000])
def test_a_long_line_takes_no_long_time(text: str) -> None:
    began = time.monotonic()
    redact_source(text)
    assert time.monotonic() - began < 5.0
