"""Children: their sessions and ends, and those that a server forks and this process adopts."""

import os
import signal
import subprocess
import sys

import pytest

from canon_pretrain.core.children import (
    ForkServer,
    end_with_torchrun,
    kill_tree,
    separate_sessions,
    start_child,
)
from tests.support import HANGS_AFTER_S, ROOT, is_running, wait_until

SERVER = """
import os, sys, time
from canon_pretrain.core.children import serve

def run(words):
    print(os.getpid(), os.getppid(), os.getsid(0), *words, flush=True)
    if words[0] == "fail":
        sys.exit(3)
    if words[0] == "wait":
        time.sleep(100)

serve(run)
"""
DRIVER = """
import sys
from canon_pretrain.core.children import (
    ForkServer,
    end_with_torchrun,
    kill_tree,
    separate_sessions,
    start_child,
)
with open(sys.argv[1], "wb") as output:
    ForkServer([sys.executable, "-c", sys.argv[2]], {}).start(["wait"], output)
sys.stdin.read()
"""


@pytest.fixture
def server():
    server = ForkServer([sys.executable, "-c", SERVER], {"PYTHONPATH": str(ROOT)})
    yield server
    server.close()


def exit_code(child):
    """Wait until a child ends, and return its code."""
    wait_until(lambda: child.poll() is not None)
    return child.returncode


def test_children_are_this_process_s_own(server, tmp_path):
    children = {}
    for word in ("end", "fail", "wait"):
        with open(tmp_path / word, "wb") as output:
            children[word] = server.start([word, "x y"], output)

    assert exit_code(children["end"]) == 0
    assert exit_code(children["fail"]) == 3
    assert children["wait"].poll() is None

    for word in ("end", "fail"):
        pid, parent, session, *words = (tmp_path / word).read_text().split()
        child = children[word]
        assert (pid, parent, session) == (str(child.pid), str(os.getpid()), str(child.pid))
        assert words == [word, "x", "y"]

    # a child outlives its server, and can be terminated twice
    server.close()
    children["wait"].terminate()
    assert exit_code(children["wait"]) == -signal.SIGTERM
    children["wait"].terminate()

    with open(os.devnull, "wb") as output, pytest.raises(OSError):
        server.start(["end"], output)


def test_a_server_that_cannot_start_is_an_os_error(tmp_path):
    server = ForkServer([sys.executable, "-c", "raise SystemExit"], {})
    with open(tmp_path / "output", "wb") as output, pytest.raises(OSError):
        server.start(["end"], output)
    server.close()


def test_children_end_with_this_process(tmp_path):
    output = tmp_path / "output"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, output, SERVER],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    wait_until(lambda: output.exists() and output.read_text().strip())
    child = int(output.read_text().split()[0])

    driver.kill()
    driver.communicate()

    wait_until(lambda: not is_running(child))


def test_a_server_that_still_imports_can_be_given_up(tmp_path):
    code = f"import time; time.sleep(60)\n{SERVER}"
    server = ForkServer([sys.executable, "-c", code], {"PYTHONPATH": str(ROOT)})
    answers = iter([False, True])

    with open(tmp_path / "output", "wb") as output:
        child = server.start(["wait"], output, gives_up=lambda: next(answers))
    server.close()

    assert child is None
    assert (tmp_path / "output").read_bytes() == b""


SLEEPS = ["sh", "-c", "setsid sleep 60 & echo $!; wait"]


def test_a_tree_is_killed_across_sessions():
    parent = start_child(SLEEPS, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.stdout.close()
    assert os.getsid(parent.pid) == parent.pid != os.getsid(0)

    kill_tree(parent.pid)

    assert parent.wait(HANGS_AFTER_S) == -signal.SIGKILL
    wait_until(lambda: not is_running(child))
    kill_tree(parent.pid)  # gone: no error


PARENT = """
import os, subprocess, sys, time
from canon_pretrain.core.children import end_with_torchrun, start_child
if sys.argv[1] == "started":
    print(start_child(["sleep", "60"]).pid, flush=True)
else:
    if os.fork() == 0:
        end_with_torchrun()
        print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["started", "rank of torchrun"])
def test_a_child_ends_with_a_killed_parent(how):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "1"}
    command = [sys.executable, "-c", PARENT, how]
    parent = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.stdout.close()

    parent.kill()
    parent.wait()

    wait_until(lambda: not is_running(child))


def test_only_ranks_of_torchrun_end_with_their_parent(monkeypatch):
    parents: list[int] = []
    monkeypatch.setattr("canon_pretrain.core.children.end_with", parents.append)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    end_with_torchrun()
    assert parents == []

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    end_with_torchrun()
    assert parents == [os.getppid()]


def test_processes_of_libraries_have_sessions_of_their_own():
    """A signal to the group of a rank, as of a terminal or torchrun, does not end a compiler."""
    with pytest.raises(KeyboardInterrupt), separate_sessions():
        compiler = subprocess.Popen(["sleep", "60"])
        exporter = subprocess.Popen(["sleep", "60"], start_new_session=True)
        with pytest.raises(FileNotFoundError):
            subprocess.Popen(["/no/such/compiler"])
        assert os.getsid(compiler.pid) == compiler.pid
        raise KeyboardInterrupt  # pressed twice: threads that wait for the compiler end

    assert compiler.wait(HANGS_AFTER_S) == -signal.SIGKILL
    assert exporter.poll() is None
    exporter.kill()
    exporter.wait()

    # outside of the context, a process stays in the session
    with subprocess.Popen(["sleep", "60"]) as plain:
        assert os.getsid(plain.pid) == os.getsid(0)
        plain.kill()
