"""The scripts that `canon completion` prints are those of today's options."""

from canon_pretrain.completion import SCRIPTS
from canon_pretrain.titan.keys import KEYS
from tests.completions import scripts, train_keys
from tests.support import canon_stage


def test_the_completions_are_current(request, capsys):
    for shell, text in scripts().items():
        path = SCRIPTS / f"canon.{shell}"
        if request.config.getoption("--snapshot-update"):
            path.write_text(text)
        assert path.read_text() == text
        canon_stage("completion")([shell])
        assert capsys.readouterr().out == text


def test_the_keys_of_a_job_are_current(request):
    text = train_keys()
    if request.config.getoption("--snapshot-update"):
        KEYS.write_text(text)
    assert KEYS.read_text() == text
