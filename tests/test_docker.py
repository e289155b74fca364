"""docker/: what the Dockerfile says, its CPU variant carried out without Docker, and the Slurm script on a made-up run.

No image is built here: bases, apt and the download of torch are not tried.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cli_process import FAKE, RECIPE, REPOSITORY, done, json_lines, started, steps, wait_until
from cluster_files import scheduler

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
SBATCH = REPOSITORY / "docker" / "penstock.sbatch"

Stage = list[tuple[str, str]]


def stages() -> list[Stage]:
    """The Dockerfile's instructions, continued lines joined: those before the first FROM, then stage by stage."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: list[Stage] = [[]]
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        if word:
            found[-1].append((word, " ".join(rest.split())))
    return found


def of(stage: Stage, word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


def test_bases_are_pinned_and_nothing_runs_as_root() -> None:
    head, *built = stages()
    assert len(built) == 2
    for base in [of(stage, "FROM")[0].split()[0] for stage in built]:
        named = of(head, "ARG")[0].partition("=")[2] if base == "${BASE}" else base
        assert re.fullmatch(r"[a-z/]+:[0-9][a-z0-9.-]*", named), base
    last = built[-1]
    assert last[-2:] == [("ENTRYPOINT", '["penstock"]'), ("CMD", '["--help"]')]
    (user,) = of(last, "USER")
    assert all(part.isdigit() and int(part) > 0 for part in user.split(":"))
    assert [word for word, _ in last].index("USER") > max(i for i, (word, _) in enumerate(last) if word == "RUN")
    for command in (rest for stage in built for rest in of(stage, "RUN") if "apt-get" in rest):
        assert "--no-install-recommends" in command
        assert command.endswith("rm -rf /var/lib/apt/lists/*")


def test_what_is_copied_is_there_and_what_is_built_is_installed() -> None:
    _, wheel, last = stages()
    name = of(wheel, "FROM")[0].split()[-1]
    git = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, text=True).split()
    known = {part for path in git for part in (path, path.partition("/")[0])}
    copied = [shlex.split(rest) for stage in (wheel, last) for rest in of(stage, "COPY")]
    own = [words for words in copied if not words[0].startswith("--from=")]
    assert {source for *sources, _ in own for source in sources} <= known
    ignored = (REPOSITORY / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{source}" for *sources, _ in own for source in sources} == {word for word in ignored if word[0] == "!"}
    assert [words for words in copied if words not in own] == [[f"--from={name}", "/wheel", "/opt/penstock/wheel"]]
    linked = {link.name for link in (REPOSITORY / "src" / "penstock").iterdir() if link.is_symlink()}
    assert {"src", *linked} <= {source for *sources, _ in own for source in sources}
    (install,) = [rest for rest in of(last, "RUN") if "pip install" in rest]
    assert "-c /opt/penstock/constraints.txt" in install
    assert install.endswith('"$(echo /opt/penstock/wheel/*.whl)${EXTRAS}"')
    assert set(json.loads(of(last, "VOLUME")[0])) == {"/runs", "/nvme", "/models", "/data"}


@pytest.mark.long
def test_the_cpu_variant_is_carried_out(tmp_path: Path) -> None:
    """Stage by stage below a folder, with this interpreter and this environment's libraries instead of downloads."""
    _, wheel, last = stages()
    site = sysconfig.get_path("purelib")

    def here(text: str) -> str:
        """With the image's places below the folder."""
        return re.sub(r"(?<![\w.:/])/(build|source|wheel|opt|runs|models|data|nvme)\b", rf"{tmp_path}/\1", text)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"EXTRAS": ""}
    for stage in (wheel, last):
        folder = tmp_path
        for word, rest in stage:
            if word == "WORKDIR":
                folder = Path(here(rest))
                folder.mkdir(exist_ok=True)
            elif word == "COPY":
                *sources, target = [part for part in shlex.split(rest) if not part.startswith("--from=")]
                for source in sources:
                    origin = tmp_path / "wheel" if source == "/wheel" else REPOSITORY / source
                    copy(origin, folder / here(target), into=target.endswith("/"))
            elif word == "ENV":
                for setting in shlex.split(rest):
                    name, _, value = setting.partition("=")
                    environment[name] = here(value).replace("$PATH", environment["PATH"])
            elif word == "RUN" and "apt-get" not in rest and "chown" not in rest:
                rest = here(rest).replace("python3 -m venv", f"{sys.executable} -m venv")
                rest = rest.replace(' --extra-index-url "${TORCH_INDEX}"', "")
                rest = rest.replace("pip install", "pip install --no-deps")
                subprocess.run(rest, shell=True, check=True, cwd=folder, env=environment)
                for packages in tmp_path.glob("opt/penstock/venv/lib/python3.*/site-packages"):
                    (packages / "libraries.pth").write_text(site + "\n")
    assert environment["USER"] == "penstock"
    (entry,) = (json.loads(rest) for rest in of(last, "ENTRYPOINT"))
    command = shutil.which(entry[0], path=environment["PATH"])
    assert command == str(tmp_path / "opt/penstock/venv/bin/penstock")

    def penstock(*arguments: str) -> str:
        return subprocess.check_output([command, *arguments], cwd=tmp_path / "runs", env=environment, text=True)

    assert penstock("--version").startswith("penstock ")
    assert json.loads(penstock("plan", "quickstart", "--json"))["fits"]
    assert "train" in penstock(*json.loads(of(last, "CMD")[0]))


def copy(origin: Path, to: Path, into: bool) -> None:
    """COPY of one source: from the repository, or what another stage has made."""
    if origin.is_dir():
        shutil.copytree(origin, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        (to if into else to.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(origin, to)


def job(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The batch script as Slurm starts it, around the stand-in for the engine."""
    (folder / "tiny.py").write_text(RECIPE)
    ours = scheduler(folder, penstock=f'exec {shlex.join(FAKE)} "$@"') | environment
    ours |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "mine", "FAKE_STEP_S": "0.05"}
    return started(folder, "bash", str(SBATCH), "tiny.py", *arguments, **ours)


def test_a_slurm_job_stops_before_its_limit_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    run, notes = tmp_path / "runs" / "mine-7", tmp_path / "notes"
    first = job(tmp_path, "--set", "train.steps=20")
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) >= 3)
    first.send_signal(signal.SIGTERM)  # to the batch script alone, as --signal=B: does
    done(first)
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert notes.read_text() == "requeue 7\n"
    at = len(steps(run))
    assert 3 <= at < 20
    done(job(tmp_path, "--set", "train.steps=20"))  # as Slurm starts it again: the same number, the same command
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert [line["step"] for line in json_lines(run / "metrics.jsonl")] == list(range(1, 21))
    assert notes.read_text() == "requeue 7\n"  # what has finished is not queued again
    assert any(f"stopped after step {at};" in line["text"] for line in json_lines(run / "log.jsonl"))


def test_a_failed_run_ends_the_job_with_its_code(tmp_path: Path) -> None:
    assert "loss is NaN" in done(job(tmp_path, FAKE_FAIL_AT="2:user"), 2).stderr
    assert not (tmp_path / "notes").exists()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", SBATCH.read_text(), re.MULTILINE))
    assert asked.items() >= {"signal": "B:TERM@300", "requeue": "", "open-mode": "append"}.items()
