"""What of a launch may be written down: no password, key or token, wherever it stands.

Names tell a secret (`WANDB_API_KEY`, `--x.api_key`), forms do (`https://user:password@host`,
`hf_...`), and so do the values of the environment's secrets, met again in any other text. The run
folder's records and every export go through here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    # PWD and OLDPWD are folders
    r"key|token(?!iz)|secret|passw|passphrase|(?<=[a-z_.-])(?<!old)pwd|credential|jwt|cookie"
    r"|private|auth(?!or)",
    re.IGNORECASE,
)
_SECRET_WORD = re.compile(r"key|token(?!iz)|secret|passw", re.IGNORECASE)
_SHORTEST = 8
"""Of a secret that is looked for in other text: a shorter one would be found in too many words."""

ALLOWED_PREFIXES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVIDIA_", "OMP_"),
    *("OPENBLAS_", "PYTORCH_", "SLURM_", "SLURMD_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_"),
    *("TRITON_", "UCX_"),
)
ALLOWED_NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "HOSTNAME", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("HF_HOME", "HF_HUB_OFFLINE", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"),
)

# repetitions are bounded: a patch may hold a line of a million letters
_IN_URL = re.compile(r"\b([a-z][a-z0-9+.-]{0,20}://)([^/\s@'\"]{1,500})@", re.IGNORECASE)
_IN_QUERY = re.compile(
    r"([?&;][^=&;?\s]{0,60}(?:key|token|secret|passw|signature)[^=&;?\s]{0,60}=)[^&;\s'\"]+",
    re.IGNORECASE,
)
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    r"|(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}"
)

_ASSIGNED = re.compile(
    # the end of a name, = or :, and a literal that is quoted or fills the rest of its line
    r"(?P<name>(?:key|token(?!iz)|secret|passw)[\w.-]{0,60})(?P<to>[\"']?[ \t]*[:=][ \t]*)"
    r"(?:(?P<quote>[\"'])(?P<quoted>[^\"'\s]+)(?P=quote)|(?P<bare>[^\s\"'()]+)(?=[ \t\r]*$))",
    re.IGNORECASE | re.MULTILINE,
)


def is_secret_name(name: str) -> bool:
    """Whether what has this name (an argument, a variable, a key) is kept out of every record."""
    return _SECRET_NAME.search(name) is not None


def redact_text(text: str) -> str:
    """`text` without passwords in URLs and without what has the form of a known service's token.

    A user alone is kept (`ssh://git@host`), except in http URLs, where tokens stand there.
    """

    def user(match: re.Match[str]) -> str:
        scheme, who = match.groups()
        harmless = ":" not in who and not scheme.lower().startswith("http")
        return match.group(0) if harmless else f"{scheme}{REDACTED}@"

    text = _IN_QUERY.sub(rf"\1{REDACTED}", _IN_URL.sub(user, text))
    return _FORMS.sub(REDACTED, text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line whose secrets are REDACTED: of `--x.api_key VALUE...`, `--x.api_key=VALUE` and
    `API_KEY=VALUE` the values, of the other words what `redact_text` finds."""
    words: list[str] = []
    hiding = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if hiding and not word.startswith("--"):
            words.append(REDACTED)
            continue
        is_name = word.startswith("-") or bool(equals)
        hiding = is_name and not equals and is_secret_name(name)
        if equals and is_secret_name(name):
            words.append(f"{redact_text(name)}={REDACTED}")
        else:
            words.append(redact_text(word))
    return words


def redact_config(value: Any) -> Any:
    """A copy of nested dicts and lists; strings below a secret name, and secret forms, REDACTED.

    Numbers and truth values stay under any name: `max_tokens` counts something.
    """
    if isinstance(value, Mapping):
        return {
            name: _hide(inner) if is_secret_name(str(name)) else redact_config(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(redact_config, value))
    return redact_text(value) if isinstance(value, str) else value


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _hide(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_hide, value))
    return REDACTED if isinstance(value, str) and value else value


def redact_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the allow-list, by name; REDACTED where name or value speaks of a secret."""
    allowed = {
        name: value
        for name, value in sorted(environ.items())
        if name in ALLOWED_NAMES or name.startswith(ALLOWED_PREFIXES)
    }
    return {
        name: REDACTED if is_secret_name(name) or _SECRET_WORD.search(value) else redact_text(value)
        for name, value in allowed.items()
    }


def secret_values(environ: Mapping[str, str], arguments: Sequence[str] = ()) -> list[str]:
    """Values that are secrets by their names, the longest first, for `scrub`."""
    values = [value for name, value in environ.items() if is_secret_name(name)]
    hiding = False
    for word in arguments:
        name, equals, value = word.partition("=")
        if hiding and not word.startswith("--"):
            values.append(word)
            continue
        hiding = word.startswith("-") and not equals and is_secret_name(name)
        if equals and is_secret_name(name):
            values.append(value)
    # a path is told by many a variable (SSH_AUTH_SOCK), and opens nothing by itself
    found = {v for v in values if len(v) >= _SHORTEST and not os.path.exists(v)}
    return sorted(found, key=lambda v: (-len(v), v))


def scrub(value: Any, secrets: Sequence[str]) -> Any:
    """`value`, a text or nested dicts and lists of them, with each of `secrets` REDACTED in it."""
    if isinstance(value, Mapping):
        return {name: scrub(inner, secrets) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(scrub(inner, secrets) for inner in value)
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
    return value


def publishable(config: dict[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """A job's configuration as it may be written down: `redact_config`, and no secret of `environ`
    in any of its values."""
    return scrub(redact_config(config), secret_values(environ))


def redact_source(text: str) -> tuple[str, int]:
    """Source code, or a patch of it, and how many literals in it are REDACTED.

    They are what `redact_text` finds, and literals that are given to a secret name: any for a
    password or secret, for a key or token one of 16 characters or more with a digit in it (a
    dictionary's key and a token of text have such names too).
    """
    count = 0

    def assigned(match: re.Match[str]) -> str:
        nonlocal count
        literal = match["quoted"] or match["bare"]
        name = match["name"].lower()
        certain = "secret" in name or "passw" in name
        looks_random = len(literal) >= 16 and re.fullmatch(r"[\w+/=.~-]*\d[\w+/=.~-]*", literal)
        if literal == REDACTED or not (looks_random or certain and match["quoted"]):
            return match[0]
        count += 1
        quote = match["quote"] or ""
        return f"{match['name']}{match['to']}{quote}{REDACTED}{quote}"

    found = redact_text(text)
    count += found.count(REDACTED) - text.count(REDACTED)
    return _ASSIGNED.sub(assigned, found), count
