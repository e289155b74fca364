"""A catalogue of what a command may be given by mistake or malice: all is bad, and nothing may end in a traceback."""

import contextlib
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bad_model_files as models
from bad_model_files import CONFIG, DEEP, NO_OBJECT
from bad_run_files import at, damaged_manifests, damaged_run_files, make_run, put, unchanged
from recipe_texts import TINY, recipe_text

from penstock.app.recipes.fields import fields

RECIPE = recipe_text()
HOSTILE = "\x1b]0;owned\x07\x1b[2J"
"""Sets a terminal's title and clears it."""


@dataclass(frozen=True)
class Bad:
    """One input. `make` writes its files into an empty folder that is the current one, and returns the arguments."""

    family: str
    name: str
    make: Callable[[Path], list[str]]
    usage: bool = False
    """The command line's own word on its arguments, which is several lines long."""
    code: int = 2


def faults(bad: Bad, folder: Path) -> list[str]:
    """Run the input's command in this process, in `folder`, which is empty. What is wrong with how it took its input,
    and what it printed; [] where it did well."""
    from penstock.app.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        arguments = bad.make(folder)
        files = files_of(folder)
        code = main(arguments)
    error, both = err.getvalue(), out.getvalue() + err.getvalue()
    one_message = error.startswith("error: ") and error.count("\n") == 1
    wrong = {
        f"exit code {code}": code != bad.code,
        "a traceback": "Traceback" in both,
        "control characters": "\x1b]" in both or "\x1b[2J" in both,
        "no word on the usage": bad.usage and error.count("Error") != 1,
        "not one message": not bad.usage and bad.code == 2 and not one_message,
        "a message without end": len(error) > 6000,
    }
    found = [name for name, there in wrong.items() if there]
    found += [f"touched {name}" for name in strange(files, files_of(folder))]
    return [*found, both] if found else []


def files_of(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file():
            found[name] = "link" if path.is_symlink() else "folder or pipe"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


A_PROCESS_BEGINS = {"log.jsonl", "status.json", "run.lock", "control.json", "metrics.jsonl", "spans.jsonl"}


def strange(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Beside a new run's directory, and what a process leaves of itself in that of an old one, nothing may change."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    def run_of(name: str) -> Path:
        return Path(*Path(name).parts[:2])

    new_runs = {run_of(name) for name in after if name.startswith("runs/")} - {run_of(name) for name in before}
    return sorted(
        name
        for name in changed - {"runs"}
        if run_of(name) not in new_runs
        and not (name.startswith("runs/") and Path(name).name in A_PROCESS_BEGINS and before.get(name) != "link")
    )


def catalogue() -> list[Bad]:
    """Every input; names are unique."""
    of_files = (_recipes, _configs, _weights, _tokenizers, _texts, _rows, _runs, _manifests, _machines)
    found = [bad for family in (*of_files, _settings, _places, _arguments) for bad in family()]
    doubled = [name for name, count in Counter((bad.family, bad.name) for bad in found).items() if count > 1]
    assert not doubled, doubled
    return found


# ---------------------------------------------------------------- what is given


def tiny(folder: Path) -> str:
    """A recipe that is right, and its corpus; the recipe's name."""
    (folder / "tiny.py").write_text(RECIPE)
    (folder / "corpus").mkdir(exist_ok=True)
    (folder / "corpus" / "a.txt").write_text("def a(): pass\n" * 40)
    return "tiny.py"


def each(
    family: str, items: dict[str, Any], make: Callable[[Path, Any], list[str]], prefix: str = "", **more: Any
) -> Iterator[Bad]:
    """An input for each of `items`: what `make` does with it in a folder, and the arguments that it returns."""
    for name, item in items.items():
        yield Bad(family, f"{prefix}{name}", lambda folder, item=item: make(folder, item), **more)


def given(name: str, *arguments: str, beside: dict[str, bytes] | None = None) -> Callable[[Path, Any], list[str]]:
    """A command beside a right recipe: what `each` has is put at `name`, other files `beside` it."""

    def make(folder: Path, what: bytes | str | Callable[[Path], object]) -> list[str]:
        tiny(folder)
        for file, content in {**(beside or {}), name: what}.items():
            put(folder / file, content)
        return list(arguments)

    return make


def words(folder: Path, arguments: list[str]) -> list[str]:
    """Arguments that are bad themselves."""
    tiny(folder)
    return arguments


def on_run(folder: Path, item: tuple[list[str], Callable[[Path], object]]) -> list[str]:
    """A command with its arguments behind the run's name, and what becomes of the run's directory before."""
    (command, *arguments), damage = item
    damage(make_run(folder / "runs" / "r"))
    return [command, "r", *arguments]


def short(text: str) -> str:
    return text if len(text) < 100 else f"{text[:30]}... ({len(text)} characters)"


def setting(command: str, *texts: str) -> list[str]:
    return [command, "tiny.py", *(word for text in texts for word in ("--set", text))]


def _odd_files(outside: bool = True) -> dict[str, Callable[[Path], object]]:
    """What stands in a folder in place of a file; without what leads out of the folder, which some may."""

    def out(path: Path) -> None:
        secret = path.parent.parent / "outside"
        secret.write_text(json.dumps(CONFIG))
        path.symlink_to(secret)

    found: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "a folder": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
        "a link to nothing": lambda path: path.symlink_to("README.md"),
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a loop of links": lambda path: path.symlink_to(path),
    }
    return found | {"a link out of the folder": out} if outside else found


def _recipes() -> Iterator[Bad]:
    programs: list[bytes | str] = ["", "x = 1\n", "recipe = {}\n", "recipe = (\n", b"recipe = 1\0\n", b"# \xff\xfe\n"]
    programs += ["from penstock.app.recipes.recipe import Recipe\nrecipe = Recipe\n", "recipe = 1\n".encode("utf-16")]
    programs += ["recipe = " + "(" * 10_000 + ")" * 10_000 + "\n", "recipe = " + "-" * DEEP + "1\n", "1 / 0\n"]
    raised = ["'no'", "'a\\nb\\nc'", repr(HOSTILE), "'\\ud800'", "'x' * 10**7"]
    programs += [f"raise ValueError({text})\n" for text in raised]
    errors = ("SystemExit('bye')", "KeyboardInterrupt", "GeneratorExit", "MemoryError")
    programs += [f"raise {error}\n" for error in errors]
    programs += ["class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd\n"]
    programs += ["class Odd(BaseException): pass\nraise Odd('no')\n", "import sys\nsys.exit(0)\n", "quit()\n"]
    programs += ["def f(): f()\nf()\n", "import no_such_module\n", "import corpus_beside\n"]
    programs += ["from penstock.app.recipes.recipe import Recipe\nrecipe = Recipe(name='x', modle=1)\n"]
    programs += ["from penstock.engine.config import TrainConfig\nTrainConfig(step=1)\n"]
    assigned = ["steps = 5", "name = 'a' * 500", "name = '../../x'", f"name = {HOSTILE!r}", "name = 5", "train = None"]
    assigned += ["train = recipe.data", "train.steps = 'ten'", "train.steps = True", "data.path = '\\udcff'"]
    values = ("recipe.model.overrides", "object()", "{1, 2}", "(1, 2)", "float('nan')", "'\\ud800'")
    assigned += [f"model.overrides['a'] = {value}" for value in values] + ["model.overrides[1] = 1"]
    odd = "class Odd:\n    def __deepcopy__(self, memo): raise RuntimeError\nrecipe.model.overrides['a'] = Odd()\n"
    python: dict[str, bytes | str] = {short(repr(program)): program for program in programs}
    python |= {text: f"{RECIPE}recipe.{text}\n" for text in assigned} | {"overrides that do not copy": RECIPE + odd}
    yield from each("recipe file", python, given("bad.py", "plan", "bad.py"), "python: ")
    tree: dict[str, Any] = {"name": "x", "model": {"num_layers": 1, "hidden_size": 8, "vocab_size": 9}}
    changes: list[Any] = [{"modle": {}}, {"machine": "\ud800"}, {"train": []}, {"train": None}, {"train": {"step": 1}}]
    changes += [{"train": {"lr": value}} for value in (10**400, float("nan"), float("inf"))]
    changes += [{"train": {"steps": value}} for value in ({}, 1.5, True, 10**30)]
    changes += [{"storage": {"nvme": value}} for value in ([1, 2], [])]
    changes += [{"data": {"source": "text", "path": path}} for path in ("a\0b", "a" * 5000)]
    trees: dict[str, Any] = {repr(value): value for value in (5, {}, {"name": None}, {"name": ["x"]})}
    trees |= {short(repr(change)): tree | change for change in changes}
    texts: dict[str, bytes | str] = {name: json.dumps(value) for name, value in trees.items()} | {
        "white space": " \n",
        "a comma too many": '{"name": "x",}',
        "deep overrides": '{"name": "x", "model": {"overrides": {"a": ' + "[" * 5000 + "]" * 5000 + "}}}",
        "digits for steps": '{"name": "x", "train": {"steps": ' + "9" * 5000 + "}}",
    }
    yield from each("recipe file", NO_OBJECT | texts, given("bad.json", "plan", "bad.json"), "json: ")
    yield from each("recipe file", _odd_files(outside=False), given("bad.json", "train", "bad.json"))


def _settings() -> Iterator[Bad]:
    """Every field with values that its type or its meaning does not take."""
    no_numbers = ["x", "", " ", "1,5", "0x10", "--1", "1e400", "nan", "inf", "-inf", "²", "١x"]
    no_numbers += ["[1]", "{}", "1 2", "1_"]
    texts = [f"train.steps={value}" for value in no_numbers]
    for field in fields():
        hint, values = str(field.type), []
        if field.key in ("budgets.gpu", "budgets.ram", "budgets.nvme", "storage.part_bytes"):
            values = ["0", "-1", "12 apples", "1e3GiB", "9" * 40, "nan"]
        elif "bool" in hint:
            values = ["maybe", "2"]
        elif "int" in hint and "str" not in hint:
            values = ["x", "1.5", "9" * 25, "9" * 5000] + (["1e23"] if "float" not in hint else [])
            values += [] if field.key in ("train.seed", "samples.seed") else ["-1"]
        elif "float" in hint:
            values = ["x", "nan", "inf", "1e999"]
            values += [] if field.key in ("train.lr", "train.weight_decay") else ["-1"]
        elif "Literal" in hint:
            values = ["sideways"]
        elif "dict" in hint:
            values = ["[1", "7", "{" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, '{"a": NaN}', "null"]
        texts += [f"{field.key}={value}" for value in values if f"{field.key}={value}" not in texts]
    texts += ["train.steps", "=5", "", "train.step=5", "trian.steps=5", "train=5", "train.steps.more=5"]
    texts += [f"name={HOSTILE}", f"{HOSTILE}.steps=5", "a" * 10_000 + "=5", "train.steps=" + "1" * 39]
    texts += [f"storage.nvme={value}" for value in ('["a", 1]', '["a"', "[" * DEEP, '["a\\u0000b"]')]
    paths = ("a\0b", "caf\udce9", "a/" * 5000, "~nobody-of-this-name/x", "\udcff")
    texts += [f"data.path={path}" for path in paths]
    texts += [f"model.{text}" for text in ("vocab_size=100000000000", "num_layers=1000000000", "num_heads=3")]
    texts += ["model.overrides.rope_theta=NaN", 'model.overrides.x="\\ud800"', "data.sequence_length=1000000000000"]
    texts += ["data.tokenizer_vocab_size=256", "train.validate_every=1", "storage.part_bytes=4097"]
    settings = {short(text): setting("plan", text) for text in texts}
    settings["more validation than data"] = setting("plan", "data.max_documents=5", "data.validation_documents=10")
    yield from each("--set", settings, words)


def _configs() -> Iterator[Bad]:
    configs, check = models.damaged_configs(), given("config.json", "check", "config.json")
    # What transformers takes and cannot compute with is a refusal: exit code 1.
    yield from each("config.json", {models.CODE_1: configs.pop(models.CODE_1)}, check, code=1)
    yield from each("config.json", configs, check)
    yield from each("config.json", _odd_files(), given("model/config.json", "check", "model"))


def _weights() -> Iterator[Bad]:
    settings = ["model.path=model", "data.source=random", "train.compute_dtype=float32"]
    train = setting("train", *settings, *(f"model.{name}=none" for name in TINY["model"]))
    model = {"model/config.json": json.dumps(CONFIG).encode()}
    weights = given("model/model.safetensors", *train, beside=model)
    headers = models.damaged_headers()  # of the others storage/test_safetensors_io.py has each
    some = ["deep lists", "data that is torn", "a pickle", "empty", "tensors of another model", "no tensors"]
    yield from each("model folder", {name: headers[name] for name in some}, weights, "header: ")
    yield from each("model folder", _odd_files(), weights, "weights: ")
    part = {"model/a.safetensors": b"\2\0\0\0\0\0\0\0{}"}
    index = given("model/model.safetensors.index.json", *train, beside=model | part)
    indexes = models.damaged_indexes()  # test_bad_input.py reads each
    some = ["shard: '../../etc/passwd'", "shard: '..'", "no map", "deep objects", "map b'[]'", "digits"]
    yield from each("model folder", {name: indexes[name] for name in some}, index, "index: ")
    for name in ("pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00001.bin", "consolidated.pth"):
        pickled = {name: b"cos\nmkdir\n(S'owned'\ntR."}
        yield from each("model folder", pickled, given(f"model/{name}", *train, beside=model), "pickle: ")


def _tokenizers() -> Iterator[Bad]:
    train = setting("train", "data.tokenizer=tokens")
    for name, files in models.damaged_tokenizers().items():
        beside = {f"tokens/{file}": content for file, content in files.items()}
        tokenizer = given("tokens/tokenizer.json", *train, beside=beside)
        yield from each("tokenizer", {name: files["tokenizer.json"]}, tokenizer)
    yield from each("tokenizer", _odd_files(), given("tokens/tokenizer.json", *train), "tokenizer.json: ")


def _texts() -> Iterator[Bad]:
    objects = [b'"text"', b'{"content": "a"}', b'{"text": 5}', b'{"text": ["a"]}', b'{"text": null}']
    objects += [b'{"text": "\\ud800"}', b'{"text": "a", "x": "\\udfff"}', b'{"text": "a"} {"text": "b"}']
    objects += [b'{"text": "\xff"}', b'{"text": ""}\n{"text": " "}', b" \n\t"]
    objects += [b'{"text": "a", "n": ' + b"9" * 5000 + b"}", b'{"text": "' + b"a" * (65 << 20)]
    objects += [b'{"text": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"]
    lines = NO_OBJECT | {short(repr(line[:200])): line + b"\n" for line in objects}
    lines |= {"UTF-16 without its mark": '{"text": "a"}\n'.encode("utf-16-le")}
    plain = [b"", b"\n \t\n", b"caf\xe9\n", b"a\xe2\x82", b"\xed\xa0\x80", bytes(range(256))]
    texts = {short(repr(text)): text for text in [*plain, "hello".encode("utf-16")[:-1]]}
    for source, name, contents in (("jsonl", "texts/bad.jsonl", lines), ("text", "texts/bad.txt", texts)):
        plan = setting("plan", f"data.source={source}", f"data.path={name}")
        # Data may lie anywhere.
        yield from each("text data", contents | _odd_files(outside=False), given(name, *plan), f"{source}: ")


def _rows() -> Iterator[Bad]:
    """Rows in every other container and format."""
    hostile = f'[{{"{HOSTILE.encode("unicode_escape").decode()}": 1}}]'
    bad = [b"", b" \n\t\n", bytes(range(256)), b"\0" * 4096, b"[" * DEEP, b"[[[]]]", b"PAR1ARROW1", hostile.encode()]
    contents = {short(repr(content[:200])): content for content in bad}
    endings = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst")
    for ending in endings:
        name = f"rows/bad{ending}"
        plan = setting("plan", "data.source=messages", f"data.path={name}")
        yield from each("rows", contents | _odd_files(outside=False), given(name, *plan), f"{ending}: ")
    odd: list[Any] = [None, 5, "text", [], {}, [5.5], [{}], [{"role": HOSTILE}], [{"from": HOSTILE}], [[1, 2]], -1]
    odd += [1e300, True]
    formats = {"messages": "messages", "sharegpt": "conversations", "alpaca": "instruction"}
    for source, field in (formats | {"prompt_completion": "prompt", "tokens": "input_ids"}).items():
        plan = setting("plan", f"data.source={source}", "data.path=rows/bad.jsonl")
        items = {repr(value): json.dumps({field: value}) for value in odd}
        yield from each("rows", items, given("rows/bad.jsonl", *plan), f"{source}: ")


def _runs() -> Iterator[Bad]:
    damaged = {f"{item[0][0]}: {name}": item for name, item in damaged_run_files().items()}
    yield from each("run directory", damaged, on_run)
    for name in ("nothing-here", "..", "a" * 300, "a\0b", HOSTILE):
        commands = ("resume", "pause", "stop", "checkpoint", "scrub", "lanes", "trace")
        absent = {f"{command}: no run {short(repr(name))}": [command, name] for command in commands}
        yield from each("run directory", absent, words)


def _manifests() -> Iterator[Bad]:
    damaged = damaged_manifests() | _odd_files()
    found = {name: (["scrub"], at("state/manifest.json", what)) for name, what in damaged.items()}
    yield from each("manifest", found, on_run)


def _places() -> Iterator[Bad]:
    def beside(folder: Path, arguments: list[str]) -> list[str]:
        put(folder / "file", "mine\n")
        put(folder / "full" / "mine", "mine\n")
        (folder / "loop").symlink_to("loop")
        make_run(folder / "runs" / "r")
        return words(folder, arguments)

    used: dict[str, Callable[[str], list[str]]] = {
        "--run-dir": lambda place: ["train", "tiny.py", "--run-dir", place],
        "export": lambda place: ["export", "r", place],
        "trace --out": lambda place: ["trace", "r", "-o", place],
        "probe --save": lambda place: ["probe", "--save", f"{place}/x"],
        "probe": lambda place: ["probe", place, "--save", "x.json"],
        "bench storage": lambda place: ["bench", "storage", place],
    }
    for how, command in used.items():
        places = ["file/below", "/dev/null/x", "a" * 300, "a/" * 3000]
        places += ["full", ""] if how == "trace --out" else ["file", "loop"]  # it replaces a file of that name
        places += ["full"] if how in ("--run-dir", "export") else []
        yield from each("places", {short(place): command(place) for place in places}, beside, f"{how}: ")


def _machines() -> Iterator[Bad]:
    from penstock.engine.machine.presets import GENERIC

    good = GENERIC.to_json()
    changed = [{"version": 99}, {"version": []}, {"speed": 1}, {"drives": []}, {"drives": 5}, {"drives": [5]}]
    changed += [{"drives": [{"path": None}]}, {"attention": []}, {"attention": None}, {"name": "\ud800"}]
    values: dict[str, Any] = {repr(change): good | change for change in changed}
    values["no version"] = {"name": "x"}
    values["a field less"] = {name: value for name, value in good.items() if name != "cores"}
    for name in ("cores", "gpu_bytes", "ram_bytes", "matmul_flops", "h2d_bytes_per_s", "duplex_share"):
        for value in (-1, None, "fast", [], True, float("nan"), 10**30 if name.endswith("_bytes") else float("inf")):
            values[f"{name} {value!r}"] = good | {name: value}
    texts = NO_OBJECT | {name: json.dumps(value) for name, value in values.items()}
    names = ("rtx9090", "/", "a\0b", HOSTILE, "a" * 5000)
    named = {short(repr(name)): ["plan", "tiny.py", "--machine", name] for name in names}
    yield from each("machine profile", texts, given("m.json", "plan", "tiny.py", "--machine", "m.json"))
    yield from each("machine profile", named, words, "no machine ")


def _arguments() -> Iterator[Bad]:
    commands = {
        "train": 1, "plan": 1, "resume": 1, "pause": 1, "stop": 1, "checkpoint": 1, "scrub": 1, "lanes": 1, "check": 0,
        "export": 2, "trace": 1, "runs": 0, "probe": 0, "bench step": 0, "bench storage": 1, "bench plan": 0,
    }  # fmt: skip
    wrong = [["nonsense"], ["bench", "nonsense"], ["--nonsense"], ["plan", "tiny.py", "--set"]]
    wrong += [["probe", "--seconds", "soon"], ["probe", "--seconds", "0"], ["bench", "storage", ".", "--rounds", "0"]]
    usages = {" ".join(arguments): arguments for arguments in wrong}
    for command, required in commands.items():
        usages[f"{command} --nonsense"] = [*command.split(), "--nonsense"]
        if required:
            usages[f"{command} without its argument"] = command.split()
        if command not in ("probe", "bench storage"):
            usages[f"{command} with too many"] = [*command.split(), *["x"] * (required + 2)]
    yield from each("arguments", usages, words, usage=True)
    steps = {}
    for text in ("5", "5:", ":5", "a:b", "1:2:3", "²:³", "-1:5", "1.5:2", "9" * 5000 + ":1", "٣:٤", HOSTILE, ""):
        for command in ("lanes", "trace") if text else ("trace",):
            steps[f"{command} --steps {short(repr(text))}"] = ([command, "--steps", text], unchanged)
    yield from each("arguments", steps, on_run)
    others = [["train", "\udcff.py"]]
    sizes = ("0", "-1", "big", "9" * 30, "nan")
    others += [["bench", "storage", ".", option, text] for option in ("--size", "--chunk") for text in sizes]
    others += [["bench", "plan", "--case", name] for name in ("nonsense", "29m-ram,nonsense", ",")]
    batches = ("512", "2x", "0x512", "2x1", "axb", "2x512x1", "9" * 30 + "x2")
    others += [["bench", "step", "--batch", text] for text in batches]
    yield from each("arguments", {" ".join(arguments): arguments for arguments in others}, words)
