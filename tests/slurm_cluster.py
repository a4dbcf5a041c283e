"""A real Slurm of two nodes on this machine, for tests: slurmctld, two slurmd and munge.

For Debian's slurm 22.05: no cgroups, no database, eight fake GPUs per node (copies of /dev/null), a
`low` partition that `high` preempts by requeueing. Needs root and Debian's slurmctld, slurmd,
slurm-client and munge. Several may run at once: ports and job ids differ.
"""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NODES = ("n1", "n2")
GPUS = 8
PATH = f"{os.environ['PATH']}:/usr/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sacct", "mknod")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket
SlurmUser=root
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobCompType=jobcomp/filetxt
JobCompLoc={state}/jobcomp.log
FirstJobId={first_job}
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
KillWait={kill_wait}
MinJobAge=3600
SlurmdTimeout=30
PropagateResourceLimits=NONE
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_port}-{last_port}] CPUs=16 \
Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=10000 Gres=gpu:{gpus}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=REQUEUE \
PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PreemptMode=OFF PriorityTier=10
"""


def missing() -> str | None:
    """Return why no cluster can be started here; None if it can."""
    absent = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return None if os.geteuid() == 0 else "needs root, for munge and for devices"


class SlurmCluster:
    """The daemons of a cluster whose files are in the folder `state`."""

    def __init__(self, state: Path, **settings: int) -> None:
        self.state = state
        self._settings = settings
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environ = outside | {"SLURM_CONF": str(state / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self.state.chmod(0o755)
        self._add_hosts()
        self._write_conf()
        self._start_munged()

        conf = str(self.state / "slurm.conf")
        self._daemon("slurmctld", "-D", "-f", conf)
        self.until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node, "-f", conf)
        self.until(
            lambda: self.run("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").stdout == "2\n",
            "two idle nodes",
        )

    def _add_hosts(self) -> None:
        try:
            for node in NODES:
                socket.getaddrinfo(node, None)
        except socket.gaierror:
            with open("/etc/hosts", "a") as hosts:
                hosts.write(f"127.0.0.1 {' '.join(NODES)}\n")

    def _write_conf(self) -> None:
        for name in ("ctld", *NODES):
            (self.state / name).mkdir()
        for gpu in range(GPUS):
            subprocess.run(["mknod", self.state / f"fakegpu{gpu}", "c", "1", "3"], check=True)
        devices = f"{self.state}/fakegpu[0-{GPUS - 1}]"
        (self.state / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={devices}\n")

        port = _free_ports()
        conf = CONF.format(
            host=socket.gethostname().split(".")[0],
            port=port,
            node_port=port + 1,
            last_port=port + len(NODES),
            gpus=GPUS,
            state=self.state,
            # slurm/lib.sh derives the port of the rendezvous from it
            first_job=random.randrange(1, 50_000),
            **self._settings,
        )
        (self.state / "slurm.conf").write_text(conf)

    def _start_munged(self) -> None:
        key = self.state / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        socket_path = self.state / "munge.socket"
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={socket_path}",
            f"--pid-file={self.state}/munged.pid",
            f"--log-file={self.state}/munged.log",
            f"--seed-file={self.state}/munged.seed",
        )
        self.until(socket_path.exists, "munged")

    def _daemon(self, name: str, *arguments: str) -> None:
        command = [str(shutil.which(name, path=PATH)), *arguments]
        with open(self.state / f"{name}.out", "ab") as log:
            daemon = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._daemons.append(daemon)

    def run(
        self, *command: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of a user of the cluster."""
        options = {"env": self.environ, "capture_output": True, "text": True} | options
        done = subprocess.run(command, timeout=60, **options)
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def until(self, happened: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        """Wait; raise AssertionError with the daemons' logs after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not happened():
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise AssertionError(f"{daemon.args} ended: {self._logs()}")
            if time.monotonic() > end:
                raise AssertionError(f"waited {timeout_s} s for {what}: {self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        logs = sorted([*self.state.glob("*.log"), *self.state.glob("*.out")])
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)

    def stop(self) -> None:
        """Kill the jobs and end the daemons."""
        self.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", check=False)
        self.run("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _free_ports() -> int:
    """Return the first of three consecutive free ports, above those of slurm/lib.sh."""
    while True:
        first = random.randrange(30_000, 32_700, 3)
        with suppress(OSError):
            for port in range(first, first + 1 + len(NODES)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first


@contextmanager
def slurm_cluster(state: Path, **settings: int) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(state, **settings)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
