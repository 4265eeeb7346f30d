"""Slurm's commands on this machine, as a program: ``python slurm.py sbatch SCRIPT``, srun, scontrol, sacct.

A job's script is run again when it ends, where it has asked for that. STANDS_IN names the folder of jobs: of each of them
``JOB.pids`` has the tasks, and ``JOB.turns`` says how often it was begun.
"""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("STANDS_IN", "."))


def install(folder: Path) -> dict[str, str]:
    """Make the commands; returns the environment in which they are found."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol", "sacct"):
        command = folder / name
        command.write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n', encoding="utf-8"
        )
        command.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "STANDS_IN": str(folder)}


def sbatch(*arguments: str) -> None:
    """Start a job, and print its number."""
    number = 101 + len(list(FOLDER.glob("*.job")))
    options = dict(
        re.findall(
            r"^#SBATCH --([\w-]+)=?(.*)$", Path(arguments[-1]).read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    (FOLDER / f"{number}.job").write_text(repr(options), encoding="utf-8")
    job = {
        "SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": options["nodes"],
        "SLURM_NTASKS": options["ntasks-per-node"],
    }  # fmt: skip
    command = [sys.executable, __file__, "turns", arguments[-1]]
    with (FOLDER / f"{number}.out").open("w") as out:
        subprocess.Popen(command, env=os.environ | job, stdout=out, stderr=out, start_new_session=True)
    print(f"Submitted batch job {number}")


def turns(script: str) -> None:
    """Run a script until it ends without having asked for another turn."""
    number, turn = os.environ["SLURM_JOB_ID"], 0
    asked = FOLDER / f"{number}.requeue"
    while turn == 0 or asked.exists():
        asked.unlink(missing_ok=True)
        given = os.environ | {"SLURM_RESTART_COUNT": str(turn)}
        turn += 1
        (FOLDER / f"{number}.turns").write_text(str(turn), encoding="utf-8")
        subprocess.run(["bash", script], env=given, check=False)
    (FOLDER / f"{number}.ended").touch()


def srun(*arguments: str) -> None:
    """Start the tasks of a job, and wait for them. They are forks of this process, which imports the libraries once for all."""
    for name in ("dpexp.train", "submitit.core._submit", "torch._dynamo", "torch.distributed"):
        importlib.import_module(name)
    command, number, files = list(arguments), os.environ["SLURM_JOB_ID"], {}
    while command[0].startswith("--"):
        option = command.pop(0)
        if option in ("--output", "--error"):
            files[option[2:]] = command.pop(0)
    tasks = []
    for rank in map(str, range(int(os.environ["SLURM_NTASKS"]))):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
        names = [files[name].replace("%j", number).replace("%t", rank) for name in ("output", "error")]
        tasks.append(forked(command, own, names))
    (FOLDER / f"{number}.pids").write_text(" ".join(map(str, tasks)), encoding="utf-8")
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(task, 0)[1])) for task in tasks))


def forked(command: list[str], own: dict[str, str], names: list[str]) -> int:
    """Do ``python -u -m MODULE WORDS`` in a fork of this process, with files for what it prints; returns the fork's number."""
    if pid := os.fork():
        return pid
    status: object = 1
    try:
        os.environ |= own
        for number, name in enumerate(names, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
        sys.argv = command[command.index("-m") + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = stop.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # no destructors of a forked interpreter
        os._exit(status if isinstance(status, int) else int(status is not None))


def scontrol(what: str, number: str) -> None:
    """Ask for another turn."""
    assert what == "requeue"
    (FOLDER / f"{number}.requeue").touch()


def sacct(*_: str) -> None:
    """Print the states of all jobs."""
    print("JobID|State|NodeList")
    for job in FOLDER.glob("*.job"):
        print(f"{job.stem}|{'COMPLETED' if job.with_suffix('.ended').exists() else 'RUNNING'}|localhost")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
