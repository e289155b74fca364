"""Functions and programs that reward, in real processes: what they are given, what they may return, and every way in
which they fail."""

import hashlib
import json
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_process import done, started

from penstock.engine.config import GrpoConfig
from penstock.engine.rewards import functions
from penstock.engine.rewards.rewards import LOG, Rewards
from penstock.storage.files.errors import UserError

Open = Callable[..., Rewards]
ROWS = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "1 + 2", "answer": "3", "hard": True}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file of reward functions."""

    def written(code: str, name: str = "mine.py") -> Path:
        path = tmp_path / "code" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return path

    return written


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens rewards, and sees to it that nothing is left of them."""
    before, every = set(children()), list[Rewards]()

    def made(*entries: str, timeout_s: float = 30) -> Rewards:
        every.append(Rewards(GrpoConfig(reward=list(entries), reward_timeout_s=timeout_s), tmp_path))
        return every[-1]

    yield made
    for rewards in every:
        rewards.close()
    assert set(children()) <= before


def children() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pid: int) -> bool:
    """Whether a process ends, which may take the kernel a moment."""
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


def scored(rewards: Rewards, completions: list[Any], rows: list[dict[str, Any]] | None = None) -> list[list[float]]:
    count = len(completions)
    rows = rows or [{"prompt": "?", "answer": str(number)} for number in range(count)]
    return rewards.scores([row["prompt"] for row in rows], completions, [[1, 2, at] for at in range(count)], rows)


def test_a_function_is_called_as_trl_calls_it(write: Callable[[str], Path], opened: Open, tmp_path: Path) -> None:
    file = write("""
        import json

        def right(prompts, completions, completion_ids, answer, **kwargs):
            print(json.dumps([prompts, completions, completion_ids, answer, kwargs]))
            return [float(text == wanted) for text, wanted in zip(completions, answer)]

        async def length(completions, **kwargs):
            return [len(text) for text in completions]
    """)
    rewards = opened(f"{file}:right", f"{file}:length")
    assert scored(rewards, ["2", "4 ☃"], ROWS) == [[1.0, 0.0], [1.0, 3.0]]
    given = [["1 + 1", "1 + 2"], ["2", "4 ☃"], [[1, 2, 0], [1, 2, 1]], ["2", "3"], {"hard": [None, True]}]
    assert json.loads((tmp_path / LOG).read_text()) == given, "what it prints is in the log"
    assert rewards.identity == dict.fromkeys(
        (f"{file}:right", f"{file}:length"), hashlib.sha256(file.read_bytes()).hexdigest()
    )


def test_messages_unicode_and_half_characters_arrive_as_they_are(write: Callable[[str], Path], opened: Open) -> None:
    file = write("""
        def same(prompts, completions, odd, **kwargs):
            print(*odd)
            said = [messages[0]["content"] for messages in completions]
            return [messages[0]["content"] == text == value for messages, text, value in zip(prompts, said, odd)]
    """)
    texts = ["\ud800", "\U0001f600\n\0\u2028", "", "'\"\\"]
    prompts, completions = ([[{"role": who, "content": text}] for text in texts] for who in ("user", "assistant"))
    rows = [{"prompt": prompt, "odd": text} for prompt, text in zip(prompts, texts, strict=True)]
    assert scored(opened(f"{file}:same"), completions, rows) == [[1.0] * 4]


def test_the_file_is_imported_once_from_its_own_folder_and_large_batches_pass(
    write: Callable[..., Path], opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near.py").write_text("raise SystemError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    write("COUNT = 10", "near.py")
    write("""
        import near, sys
        calls = near.COUNT

        def count(completions, **kwargs):
            global calls
            calls += 1
            return [calls + len(text) for text in completions]
    """)
    path = list(sys.path)
    rewards = opened("code/mine.py:count")
    for call in range(1, 4):
        assert scored(rewards, ["x" * 10_000] * 1000) == [[10_010.0 + call] * 1000]
    assert sys.path == path
    assert "near" not in sys.modules
    assert scored(opened("code/mine.py:count"), ["x"]) == [[12.0]], "another opening begins anew"


def test_none_is_no_reward_and_a_completion_that_none_rewards_is_nan(
    write: Callable[[str], Path], opened: Open
) -> None:
    file = write("""
        import fractions

        def some(completions, **kwargs):
            return (fractions.Fraction(len(text), 2) if text else None for text in completions)

        def others(completions, **kwargs):
            return [True if text == "a" else None for text in completions]
    """)
    assert scored(opened(f"{file}:some", f"{file}:others"), ["a", "bb"]) == [[0.5, 1.0], [1.0, 0.0]]
    first, second = scored(opened(f"{file}:some", f"{file}:others"), ["", "a"])
    assert math.isnan(first[0])
    assert math.isnan(second[0])
    assert [first[1], second[1]] == [0.5, 1.0]


OPENING = {
    "missing file": (None, "grpo.reward[0]: {entry}: there is no such file; name one"),
    "missing function": (
        "def left(**kwargs): ...\ndef up(**kwargs): ...\nright = 3",
        "{entry}: there is no function 'right' in it; it has left, up",
    ),
    "syntax": ("\n\ndef right(:\n", "{entry}, line 3: SyntaxError: invalid syntax"),
    "import": ("import os\nimport no_such_module\n", "{entry}, line 2: ModuleNotFoundError: No module named 'no_such"),
    "end": ("import sys\n\nsys.exit('enough')\n", "{entry}, line 3: SystemExit: enough"),
    "death": (
        "import os, signal\nos.kill(os.getpid(), 9)",
        "{entry}: its process was killed by SIGKILL; SIGKILL usual",
    ),
    "exit": ("import os\nos._exit(3)", "{entry}: its process ended with exit code 3"),
}


@pytest.mark.parametrize("case", OPENING)
def test_what_cannot_be_called_is_refused_when_it_is_opened(
    write: Callable[[str], Path], opened: Open, tmp_path: Path, case: str
) -> None:
    code, said = OPENING[case]
    file = tmp_path / "none.py" if code is None else write(code)
    with pytest.raises(UserError) as caught:
        opened(f"{file}:right")
    assert said.format(entry=f"{file}:right") in str(caught.value)
    assert "\n" not in str(caught.value)


CALLS = {
    "raise": ("x = 1\n    return [{}[0] for _ in completions]", ", line 3: KeyError: 0"),
    "of a library": ("import json\n    json.loads('{')", ", line 3: json.decoder.JSONDecodeError: Expecting"),
    "few": ("return [1]", ": it returned 1 rewards for 2 completions"),
    "nothing": ("pass", ": it returned NoneType; expected a list of numbers"),
    "one number": ("return 1.0", ": it returned float; expected a list of numbers"),
    "text": ("return '11'", ": it returned str; expected a list of numbers"),
    "texts": ("return [1, '1']", ": its reward for completion 1 is '1', which is no number"),
    "huge": ("return [1, 10 ** 400]", "which is no number"),
    "nan": (
        "return [1, float('nan')]",
        ": its reward for completion 1 is nan, of the row {'prompt': '?', 'answer': '1",
    ),
    "inf": ("return [float('-inf'), 1]", ": its reward for completion 0 is -inf, of the row {'prompt': '?', 'answer'"),
    "exit": ("raise SystemExit(4)", ", line 2: SystemExit: 4"),
    "death": ("import os; os.abort()", ": its process was killed by SIGABRT"),
    "hang": ("import time; time.sleep(1000)", ": rewarding 2 completions took longer than 0.5 s and was ended; mend"),
    "busy": ("while True: pass", "took longer than 0.5 s and was ended; mend the function, or raise grpo.reward_timeo"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_function_that_fails_is_one_line(write: Callable[[str], Path], opened: Open, case: str) -> None:
    code, said = CALLS[case]
    file = write("def right(completions, **kwargs):\n    " + code)
    rewards = opened(f"{file}:right", timeout_s=0.5 if case in ("hang", "busy") else 30)
    with pytest.raises(UserError) as caught:
        scored(rewards, ["a", "b"])
    assert str(caught.value).startswith(f"grpo.reward[0]: {file}:right")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    if case in ("death", "hang"):
        with pytest.raises(UserError, match="its process has ended"):
            scored(rewards, ["a", "b"])


def test_a_function_that_does_not_take_the_columns_is_told_how(write: Callable[[str], Path], opened: Open) -> None:
    rewards = opened(f"{write('def right(prompts, completions, completion_ids): return [1]')}:right")
    with pytest.raises(
        UserError, match=r"TypeError: .*unexpected keyword argument 'answer'; let the function take \*\*"
    ):
        scored(rewards, ["a"])


def test_a_function_that_has_raised_is_called_again(write: Callable[[str], Path], opened: Open) -> None:
    file = write("def right(completions, **kwargs):\n    return [1 / len(text) for text in completions]")
    rewards = opened(f"{file}:right")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        scored(rewards, [""])
    assert scored(rewards, ["ab"]) == [[0.5]]


def test_a_file_that_never_ends_its_import_is_ended(
    write: Callable[[str], Path], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "OPENING_S", 0.5)
    with pytest.raises(UserError, match=r"importing the file took longer than 0\.5 s and was ended; mend the file"):
        opened(f"{write('import time; time.sleep(1000)')}:right")


STARTING = """
    import subprocess, sys, os

    def right(completions, **kwargs):
        near = subprocess.Popen(["sleep", "1000"])
        far = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        forked = os.fork()
        if not forked:
            import time; time.sleep(1000)
        print(near.pid, far.pid, forked, os.getpid())
        if "hang" in completions: near.wait()
        return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("way", ["closed", "hang", "killed"])
def test_what_a_function_starts_ends_with_it(
    write: Callable[[str], Path], opened: Open, tmp_path: Path, way: str
) -> None:
    rewards = opened(f"{write(STARTING)}:right", timeout_s=1 if way == "hang" else 30)
    if way == "hang":
        with pytest.raises(UserError, match="took longer than 1 s"):
            scored(rewards, ["hang"])
    else:
        assert scored(rewards, ["a"]) == [[1.0]]
    *started_by_it, worker = map(int, (tmp_path / LOG).read_text().split())
    if way == "closed":
        assert all(map(is_running, (*started_by_it, worker)))
        rewards.close()
        rewards.close()
    if way == "killed":
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(UserError, match="its process was killed by SIGKILL"):
            scored(rewards, ["a"])
        started_by_it.remove(far := started_by_it[1])  # its parent is gone, and its session is its own
        os.kill(far, signal.SIGKILL)
    assert all(map(gone, (*started_by_it, worker)))


def test_a_worker_ends_with_the_process_that_opened_it(write: Callable[[str], Path], tmp_path: Path) -> None:
    file = write("""
        import os, subprocess
        print(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid)

        def right(**kwargs):
            while True: pass
    """)
    code = f"""
        import os, signal, threading
        from pathlib import Path
        from penstock.engine.config import GrpoConfig
        from penstock.engine.rewards.rewards import Rewards
        rewards = Rewards(GrpoConfig(reward=[{f"{file}:right"!r}]), Path({str(tmp_path)!r}))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        rewards.scores(["a"], ["a"], [[1]], [{{"prompt": "a"}}])
    """
    done(started(tmp_path, sys.executable, "-c", textwrap.dedent(code)), code=-signal.SIGKILL)
    assert all(map(gone, map(int, (tmp_path / LOG).read_text().split())))


def test_a_log_does_not_grow_without_end(
    write: Callable[[str], Path], opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.rewards.rewards._MOST_LOG_BYTES", 1000)
    file = write("def right(completions, **kwargs):\n    print('x' * 700)\n    return [1]")
    rewards = opened(f"{file}:right")
    for _ in range(5):
        scored(rewards, ["a"])
    assert (tmp_path / LOG).read_text() == ("x" * 700 + "\n")


# ---------------------------------------------------------------------- programs


def test_a_program_gets_the_completion_and_its_row(opened: Open, tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text(
        "import json, os, sys\n"
        "row = os.environ['PENSTOCK_ROW']\n"
        "row = json.loads(row if row.startswith('{') else open(row).read())\n"
        "text = sys.stdin.buffer.read().decode()\n"
        "if len(row) > 3: print(len(row['more']))\n"
        "else: sys.exit(text != row['answer'])\n"
    )
    command = f"command: {sys.executable} {check}"
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": "☃\n", "n": None},
        {"prompt": "a", "answer": "b", "n": 1.5},
        {"prompt": "a", "answer": "b", "n": 1, "more": "x" * 300_000},
    ]
    rewards = opened(command)
    assert scored(rewards, ["☃\n", "☃", "b"], rows) == [[1.0, 0.0, 300_000.0]]
    talk = [[{"role": "assistant", "content": "☃\n"}], [{"role": "assistant", "content": None}]]
    assert scored(rewards, talk, rows[:2]) == [[1.0, 0.0]]
    assert rewards.identity == {command: hashlib.sha256(command.removeprefix("command: ").encode()).hexdigest()}


PROGRAMS = {
    "true": 1.0, "false": 0.0, "exit 3": 0.0, "kill -9 $$": 0.0, "echo 0.25": 0.25, "echo 1; echo -2.5; echo": -2.5,
    "echo 5; exit 1": 0.0, "echo fine": 1.0, "cat": 1.0, "echo 7 >&2": 1.0, "exec >&-; true": 1.0,
    "head -c 9999999 /dev/zero; echo; echo 3": 3.0, "grep -q 42": 1.0, "sleep 1000 & echo 2": 2.0, 
    "echo nan; false": 0.0,
}  # fmt: skip


def test_exit_code_and_last_line_are_the_reward(opened: Open) -> None:
    rewards = opened(*(f"command: {command}" for command in PROGRAMS))
    found = scored(rewards, ["the answer: 42 \ud800"])
    assert {command: reward for command, (reward,) in zip(PROGRAMS, found, strict=True)} == PROGRAMS
    assert rewards.timed_out == 0


def test_a_program_that_hangs_is_worth_nothing_and_counted(opened: Open) -> None:
    hangs = 'read -r line; [ "$line" != hang ] && exit 0; sleep 1000 & sleep 1000'
    rewards = opened(f"command: {hangs}", "command: if grep -q hang; then yes; fi", timeout_s=1)
    found = scored(rewards, ["a\n", "hang\n", "b\n", "hang\n", "c\n"])
    assert found == [[1.0, 0.0, 1.0, 0.0, 1.0]] * 2
    assert rewards.timed_out == 4


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo 'open", r"the shell cannot read the command \(.*\); mend it"),
        ("no-such-program --now", "there is no program no-such-program; install it, or name another"),
        ("/no/such/program", "there is no program /no/such/program"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_when_it_is_opened(opened: Open, command: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^grpo\.reward\[0\]: command: {command}: {said}"):
        opened(f"command: {command}")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("true && no-such-program", "exit code 127: the shell found no such program"),
        ("/etc/passwd", "exit code 126: the shell found no such program, or cannot start it"),
        ("echo 1; echo inf", "it printed inf as its last line; a reward must be finite"),
    ],
)
def test_a_program_that_cannot_say_what_a_completion_is_worth_ends_all(opened: Open, command: str, said: str) -> None:
    rewards = opened(f"command: if grep -q bad; then {command}; else sleep 1000; fi", timeout_s=300)
    with pytest.raises(UserError, match=said):
        scored(rewards, ["bad", *["fine"] * 20])
