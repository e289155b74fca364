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

from bad_model_files import (
    CODE_1,
    CONFIG,
    DEEP,
    NO_OBJECT,
    damaged_configs,
    damaged_headers,
    damaged_indexes,
    damaged_tokenizers,
)
from bad_run_files import at, damaged_manifests, damaged_run_files, make_run, put, unchanged
from recipe_texts import TINY, recipe_text

from penstock.app.recipe_fields import fields

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


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    strange: list[str]
    """Files that were made, changed or removed and should not have been."""


def run(bad: Bad, folder: Path) -> Outcome:
    """Run the input's command in this process, in `folder`, which is empty."""
    from penstock.app.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        arguments = bad.make(folder)
        files = _files(folder)
        code = main(arguments)
    return Outcome(code, out.getvalue(), err.getvalue(), _strange(files, _files(folder)))


def faults(bad: Bad, found: Outcome) -> list[str]:
    """What is wrong with how a command took its input; [] where it did well."""
    wrong = []
    if found.code != bad.code:
        wrong.append(f"exit code {found.code}")
    if "Traceback" in found.out + found.err:
        wrong.append("a traceback")
    if "\x1b]" in found.out + found.err or "\x1b[2J" in found.out + found.err:
        wrong.append("control characters")
    if bad.usage:
        if found.err.count("Error") != 1:
            wrong.append("no word on the usage")
    elif bad.code == 2 and not (found.err.startswith("error: ") and found.err.count("\n") == 1):
        wrong.append("not one message")
    if len(found.err) > 6000:
        wrong.append("a message without end")
    return wrong + [f"touched {name}" for name in found.strange]


def _files(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file():
            found[name] = "link" if path.is_symlink() else "folder or pipe"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


_A_PROCESS_BEGINS = {"log.jsonl", "status.json", "run.lock", "control.json", "metrics.jsonl", "spans.jsonl"}


def _strange(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Beside a new run's directory, and what a process leaves of itself in that of an old one, nothing may change."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    new_runs = {Path(*Path(name).parts[:2]) for name in after if name.startswith("runs/")} - {
        Path(*Path(name).parts[:2]) for name in before
    }
    return sorted(
        name
        for name in changed
        if name != "runs"
        and Path(*Path(name).parts[:2]) not in new_runs
        and not (name.startswith("runs/") and Path(name).name in _A_PROCESS_BEGINS and before.get(name) != "link")
    )


def catalogue() -> list[Bad]:
    """Every input; names are unique."""
    found = [
        *_recipes(),
        *_settings(),
        *_configs(),
        *_weights(),
        *_tokenizers(),
        *_texts(),
        *_rows(),
        *_runs(),
        *_manifests(),
        *_places(),
        *_machines(),
        *_arguments(),
    ]
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
    python: dict[str, bytes | str] = {
        "empty": "",
        "no recipe": "x = 1\n",
        "recipe of another type": "recipe = {}\n",
        "the class itself": "from penstock.app.recipe import Recipe\nrecipe = Recipe\n",
        "syntax": "recipe = (\n",
        "zero bytes": b"recipe = 1\0\n",
        "not UTF-8": b"# \xff\xfe\n",
        "UTF-16": "recipe = 1\n".encode("utf-16"),
        "deep brackets": "recipe = " + "(" * 10_000 + ")" * 10_000 + "\n",
        "deep minus": "recipe = " + "-" * DEEP + "1\n",
        "raises": "raise ValueError('no')\n",
        "raises many lines": "raise ValueError('a\\nb\\nc')\n",
        "raises escapes": f"raise ValueError({HOSTILE!r})\n",
        "raises half a character": "raise ValueError('\\ud800')\n",
        "raises a long text": "raise ValueError('x' * 10**7)\n",
        "raises an exception that cannot be shown": (
            "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd\n"
        ),
        "raises a base exception": "class Odd(BaseException): pass\nraise Odd('no')\n",
        "exits": "import sys\nsys.exit(0)\n",
        "exits with a text": "raise SystemExit('bye')\n",
        "quits": "quit()\n",
        "is interrupted": "raise KeyboardInterrupt\n",
        "generator exit": "raise GeneratorExit\n",
        "recurses": "def f(): f()\nf()\n",
        "memory": "raise MemoryError\n",
        "divides by zero": "1 / 0\n",
        "imports nothing that is there": "import no_such_module\n",
        "imports its folder's": "import corpus_beside\n",
        "unknown section": "from penstock.app.recipe import Recipe\nrecipe = Recipe(name='x', modle=1)\n",
        "unknown field": "from penstock.engine.config import TrainConfig\nTrainConfig(step=1)\n",
        "unknown attribute": RECIPE + "recipe.steps = 5\n",
        "a name too long": RECIPE + "recipe.name = 'a' * 500\n",
        "a name that leads out": RECIPE + "recipe.name = '../../x'\n",
        "a name of escapes": RECIPE + f"recipe.name = {HOSTILE!r}\n",
        "a name that is a number": RECIPE + "recipe.name = 5\n",
        "a section that is none": RECIPE + "recipe.train = None\n",
        "a section that is another": RECIPE + "recipe.train = recipe.data\n",
        "text for steps": RECIPE + "recipe.train.steps = 'ten'\n",
        "true for steps": RECIPE + "recipe.train.steps = True\n",
        "overrides in themselves": RECIPE + "recipe.model.overrides['a'] = recipe.model.overrides\n",
        "overrides of objects": RECIPE + "recipe.model.overrides['a'] = object()\n",
        "overrides of sets": RECIPE + "recipe.model.overrides['a'] = {1, 2}\n",
        "overrides of tuples": RECIPE + "recipe.model.overrides['a'] = (1, 2)\n",
        "overrides of NaN": RECIPE + "recipe.model.overrides['a'] = float('nan')\n",
        "overrides by number": RECIPE + "recipe.model.overrides[1] = 1\n",
        "overrides of half a character": RECIPE + "recipe.model.overrides['a'] = '\\ud800'\n",
        "overrides that do not copy": RECIPE
        + "class Odd:\n    def __deepcopy__(self, memo): raise RuntimeError\nrecipe.model.overrides['a'] = Odd()\n",
        "a path of half a character": RECIPE + "recipe.data.path = '\\udcff'\n",
    }
    yield from each("recipe file", python, given("bad.py", "plan", "bad.py"), "python: ")
    tree: dict[str, Any] = {"name": "x", "model": {"num_layers": 1, "hidden_size": 8, "vocab_size": 9}}
    trees: dict[str, Any] = {
        "a number": 5,
        "no name": {},
        "a name that is null": {"name": None},
        "a name that is a list": {"name": ["x"]},
        "an unknown section": tree | {"modle": {}},
        "a section that is a list": tree | {"train": []},
        "a section that is null": tree | {"train": None},
        "an unknown field": tree | {"train": {"step": 1}},
        "a field that is an object": tree | {"train": {"steps": {}}},
        "a float for a count": tree | {"train": {"steps": 1.5}},
        "true for a count": tree | {"train": {"steps": True}},
        "a huge count": tree | {"train": {"steps": 10**30}},
        "a huge float": tree | {"train": {"lr": 10**400}},
        "NaN": tree | {"train": {"lr": float("nan")}},
        "infinity": tree | {"train": {"lr": float("inf")}},
        "drives that are numbers": tree | {"storage": {"nvme": [1, 2]}},
        "no drives": tree | {"storage": {"nvme": []}},
        "half a character": tree | {"machine": "\ud800"},
        "a path of a zero byte": tree | {"data": {"source": "text", "path": "a\0b"}},
        "a path too long": tree | {"data": {"source": "text", "path": "a" * 5000}},
    }
    texts: dict[str, bytes | str] = {name: json.dumps(value) for name, value in trees.items()} | {
        "white space": " \n",
        "a comma too many": '{"name": "x",}',
        "deep overrides": '{"name": "x", "model": {"overrides": {"a": ' + "[" * 5000 + "]" * 5000 + "}}}",
        "digits for steps": '{"name": "x", "train": {"steps": ' + "9" * 5000 + "}}",
    }
    yield from each("recipe file", NO_OBJECT | texts, given("bad.json", "plan", "bad.json"), "json: ")
    yield from each("recipe file", _odd_files(outside=False), given("bad.json", "train", "bad.json"))


_NO_NUMBERS = ("x", "", " ", "1,5", "0x10", "--1", "1e400", "nan", "inf", "-inf", "²", "١x", "[1]", "{}", "1 2", "1_")


def _settings() -> Iterator[Bad]:
    """Every field with values that its type or its meaning does not take."""
    texts = {f"train.steps={value!r}": f"train.steps={value}" for value in _NO_NUMBERS}
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
        for value in values:
            shown = value if len(value) < 20 else f"{value[:6]}... ({len(value)} characters)"
            texts[f"{field.key}={shown}"] = f"{field.key}={value}"
    texts |= {
        "no value": "train.steps",
        "no key": "=5",
        "empty": "",
        "an unknown field": "train.step=5",
        "an unknown section": "trian.steps=5",
        "a section": "train=5",
        "below a number": "train.steps.more=5",
        "a name of escapes": f"name={HOSTILE}",
        "an unknown field of escapes": f"{HOSTILE}.steps=5",
        "a long unknown field": "a" * 10_000 + "=5",
        "a list with a number in it": 'storage.nvme=["a", 1]',
        "a torn list": 'storage.nvme=["a"',
        "deep lists": "storage.nvme=" + "[" * DEEP,
        "a zero byte in a list": 'storage.nvme=["a\\u0000b"]',
        "a path of a zero byte": "data.path=a\0b",
        "a path that is no text": "data.path=caf\udce9",
        "a path too long": "data.path=" + "a/" * 5000,
        "an unknown home": "data.path=~nobody-of-this-name/x",
        "many digits": "train.steps=" + "1" * 39,
        "half a character": "data.path=\udcff",
        "a vocabulary of 1e11": "model.vocab_size=100000000000",
        "1e12 tokens": "data.sequence_length=1000000000000",
        "1e9 layers": "model.num_layers=1000000000",
        "an override of NaN": "model.overrides.rope_theta=NaN",
        "an override of half a character": 'model.overrides.x="\\ud800"',
        "heads that do not divide": "model.num_heads=3",
        "a tokenizer too small": "data.tokenizer_vocab_size=256",
        "validation without documents": "train.validate_every=1",
        "a chunk of odd bytes": "storage.part_bytes=4097",
    }
    settings = {name: setting("plan", text) for name, text in texts.items()}
    settings["more validation than data"] = setting("plan", "data.max_documents=5", "data.validation_documents=10")
    yield from each("--set", settings, words)


def _configs() -> Iterator[Bad]:
    configs, check = damaged_configs(), given("config.json", "check", "config.json")
    # What transformers takes and cannot compute with is a refusal: exit code 1.
    refused = {name: configs.pop(name) for name in CODE_1}
    yield from each("config.json", configs, check)
    yield from each("config.json", refused, check, code=1)
    yield from each("config.json", _odd_files(), given("model/config.json", "check", "model"))


def _weights() -> Iterator[Bad]:
    settings = ["model.path=model", "data.source=random", "train.compute_dtype=float32"]
    train = setting("train", *settings, *(f"model.{name}=none" for name in TINY["model"]))
    model = {"model/config.json": json.dumps(CONFIG).encode()}
    weights = given("model/model.safetensors", *train, beside=model)
    yield from each("model folder", damaged_headers(), weights, "header: ")
    yield from each("model folder", _odd_files(), weights, "weights: ")
    part = {"model/a.safetensors": b"\2\0\0\0\0\0\0\0{}"}
    index = given("model/model.safetensors.index.json", *train, beside=model | part)
    yield from each("model folder", damaged_indexes(), index, "index: ")
    for name in ("pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00001.bin", "consolidated.pth"):
        pickled = {name: b"cos\nmkdir\n(S'owned'\ntR."}
        yield from each("model folder", pickled, given(f"model/{name}", *train, beside=model), "pickle: ")


def _tokenizers() -> Iterator[Bad]:
    train = setting("train", "data.tokenizer=tokens")
    for name, files in damaged_tokenizers().items():
        beside = {f"tokens/{file}": content for file, content in files.items()}
        tokenizer = given("tokens/tokenizer.json", *train, beside=beside)
        yield from each("tokenizer", {name: files["tokenizer.json"]}, tokenizer)
    yield from each("tokenizer", _odd_files(), given("tokens/tokenizer.json", *train), "tokenizer.json: ")


def _texts() -> Iterator[Bad]:
    lines = NO_OBJECT | {
        "white space": b"\n \n\t\n",
        "empty texts": b'{"text": ""}\n{"text": " "}\n',
        "a text": b'"text"\n',
        "no text": b'{"content": "a"}\n',
        "a number for the text": b'{"text": 5}\n',
        "a list for the text": b'{"text": ["a"]}\n',
        "null for the text": b'{"text": null}\n',
        "half a character": b'{"text": "\\ud800"}\n',
        "half a character in another field": b'{"text": "a", "x": "\\udfff"}\n',
        "not UTF-8": b'{"text": "\xff"}\n',
        "UTF-16 without its mark": '{"text": "a"}\n'.encode("utf-16-le"),
        "deep in another field": b'{"text": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
        "two values in a line": b'{"text": "a"} {"text": "b"}\n',
        "digits": b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n",
        "a line that does not end": b'{"text": "' + b"a" * (65 << 20),
    }
    texts = {
        "empty": b"",
        "white space": b"\n \t\n",
        "not UTF-8": b"caf\xe9\n",
        "UTF-16, torn": "hello".encode("utf-16")[:-1],
        "a torn character": b"a\xe2\x82",
        "half a character": b"\xed\xa0\x80",
        "bytes": bytes(range(256)),
    }
    for source, name, contents in (("jsonl", "texts/bad.jsonl", lines), ("text", "texts/bad.txt", texts)):
        plan = setting("plan", f"data.source={source}", f"data.path={name}")
        # Data may lie anywhere.
        yield from each("text data", contents | _odd_files(outside=False), given(name, *plan), f"{source}: ")


def _rows() -> Iterator[Bad]:
    """Rows in every other container and format."""
    contents: dict[str, bytes | str] = {
        "empty": b"",
        "white space": b" \n\t\n",
        "bytes": bytes(range(256)),
        "zero bytes": b"\0" * 4096,
        "a name of escapes": f'[{{"{HOSTILE.encode("unicode_escape").decode()}": 1}}]',
        "deep": b"[" * DEEP,
        "a list of lists": b"[[[]]]",
        "a magic word": b"PAR1ARROW1",
    }
    endings = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst")
    for ending in endings:
        name = f"rows/bad{ending}"
        plan = setting("plan", "data.source=messages", f"data.path={name}")
        yield from each("rows", contents | _odd_files(outside=False), given(name, *plan), f"{ending}: ")
    odd: list[Any] = [
        None,
        5,
        "text",
        [],
        {},
        [5.5],
        [{}],
        [{"role": HOSTILE}],
        [{"from": HOSTILE}],
        [[1, 2]],
        -1,
        1e300,
        True,
    ]
    for source, field in (
        ("messages", "messages"),
        ("sharegpt", "conversations"),
        ("alpaca", "instruction"),
        ("prompt_completion", "prompt"),
        ("tokens", "input_ids"),
    ):
        plan = setting("plan", f"data.source={source}", "data.path=rows/bad.jsonl")
        items = {repr(value): json.dumps({field: value}) for value in odd}
        yield from each("rows", items, given("rows/bad.jsonl", *plan), f"{source}: ")


def _runs() -> Iterator[Bad]:
    damaged = {f"{item[0][0]}: {name}": item for name, item in damaged_run_files().items()}
    yield from each("run directory", damaged, on_run)
    for name in ("nothing-here", "..", "a" * 300, "a\0b", HOSTILE):
        shown = "a long name" if len(name) > 100 else repr(name)
        commands = ("resume", "pause", "stop", "checkpoint", "scrub", "lanes", "trace")
        yield from each("run directory", {f"{command}: no run {shown}": [command, name] for command in commands}, words)


def _manifests() -> Iterator[Bad]:
    damaged = damaged_manifests() | _odd_files()
    found = {name: (["scrub"], at("state/manifest.json", what)) for name, what in damaged.items()}
    yield from each("manifest", found, on_run)


def _places() -> Iterator[Bad]:
    def file(folder: Path) -> str:
        put(folder / "file", "mine\n")
        return "file"

    def full(folder: Path) -> str:
        put(folder / "full" / "mine", "mine\n")
        return "full"

    def loop(folder: Path) -> str:
        (folder / "loop").symlink_to("loop")
        return "loop"

    places: dict[str, Callable[[Path], str]] = {
        "a file": file,
        "below a file": lambda folder: f"{file(folder)}/below",
        "a loop of links": loop,
        "below a device": lambda folder: "/dev/null/x",
        "a name too long": lambda folder: "a" * 300,
        "a path too long": lambda folder: "a/" * 3000,
    }
    replaced = {name: place for name, place in places.items() if name in ("a file", "a loop of links")}
    used: dict[str, Callable[[Path, str], list[str]]] = {
        "--run-dir": lambda folder, place: ["train", tiny(folder), "--run-dir", place],
        "probe --save": lambda folder, place: ["probe", "--save", f"{place}/x"],
        "probe": lambda folder, place: ["probe", place, "--save", "x.json"],
        "bench storage": lambda folder, place: ["bench", "storage", place],
        "export": lambda folder, place: on_run(folder, (["export", place], unchanged)),
        "trace --out": lambda folder, place: on_run(folder, (["trace", "-o", place], unchanged)),
    }
    for how, command in used.items():
        found = dict(places)
        if how in ("--run-dir", "export"):
            found["a folder with a file"] = full
        if how == "trace --out":  # a file is replaced, like any of that name
            found = {name: place for name, place in places.items() if name not in replaced}
            found |= {"a folder": full, "nothing": lambda folder: ""}
        yield from each(
            "places", found, lambda folder, place, command=command: command(folder, place(folder)), f"{how}: "
        )  # type: ignore[misc]


def _machines() -> Iterator[Bad]:
    from penstock.engine.machine.presets import GENERIC

    good = GENERIC.to_json()
    values: dict[str, Any] = {
        "no version": {"name": "x"},
        "another version": good | {"version": 99},
        "a version that is a list": good | {"version": []},
        "an unknown field": good | {"speed": 1},
        "a field less": {name: value for name, value in good.items() if name != "cores"},
        "no drives": good | {"drives": []},
        "drives that are a number": good | {"drives": 5},
        "a drive that is a number": good | {"drives": [5]},
        "a drive with less": good | {"drives": [{"path": None}]},
        "no attention": good | {"attention": []},
        "attention that is null": good | {"attention": None},
    }
    for name in ("cores", "gpu_bytes", "ram_bytes", "matmul_flops", "h2d_bytes_per_s", "duplex_share"):
        for value in (-1, None, "fast", [], True, float("nan"), 10**30 if name.endswith("_bytes") else float("inf")):
            values[f"{name} {value!r}"] = good | {name: value}
    values["half a character"] = good | {"name": "\ud800"}
    texts = NO_OBJECT | {name: json.dumps(value) for name, value in values.items()}
    names = {"a long name": "a" * 5000} | {repr(name): name for name in ("rtx9090", "/", "a\0b", HOSTILE)}
    named = {name: ["plan", "tiny.py", "--machine", machine] for name, machine in names.items()}
    yield from each("machine profile", texts, given("m.json", "plan", "tiny.py", "--machine", "m.json"))
    yield from each("machine profile", named, words, "no machine ")


def _arguments() -> Iterator[Bad]:
    commands = {
        "train": 1, "plan": 1, "resume": 1, "pause": 1, "stop": 1, "checkpoint": 1, "scrub": 1, "lanes": 1, "check": 1,
        "export": 2, "trace": 1, "runs": 0, "probe": 0, "bench step": 0, "bench memory": 0, "bench attention": 0,
        "bench storage": 1, "bench plan": 0, "bench planned": 0, "bench packing": 0,
    }  # fmt: skip
    usages: dict[str, list[str]] = {
        "an unknown command": ["nonsense"],
        "an unknown bench": ["bench", "nonsense"],
        "an unknown option": ["--nonsense"],
        "--set without a text": ["plan", "tiny.py", "--set"],
        "probe for words": ["probe", "--seconds", "soon"],
        "probe for no time": ["probe", "--seconds", "0"],
        "rounds that are none": ["bench", "storage", ".", "--rounds", "0"],
        "tokens that are words": ["bench", "attention", "--tokens", "many"],
        "a limit that is a word": ["bench", "plan", "--time-limit", "soon"],
    }
    for command, required in commands.items():
        usages[f"{command} --nonsense"] = [*command.split(), "--nonsense"]
        if required:
            usages[f"{command} without its argument"] = command.split()
        if command not in ("probe", "bench storage"):
            usages[f"{command} with too many"] = [*command.split(), *["x"] * (required + 2)]
    yield from each("arguments", usages, words, usage=True)
    steps = {}
    for text in ("5", "5:", ":5", "a:b", "1:2:3", "²:³", "-1:5", "1.5:2", "9" * 5000 + ":1", "٣:٤", HOSTILE, ""):
        shown = repr(text) if len(text) < 100 else "digits"
        for command in ("lanes", "trace") if text else ("trace",):
            steps[f"{command} --steps {shown}"] = ([command, "--steps", text], unchanged)
    yield from each("arguments", steps, on_run)
    others = {"half a character": ["train", "\udcff.py"]}
    for option in ("--size", "--chunk"):
        for text in ("0", "-1", "big", "9" * 30, "nan"):
            others[f"bench storage {option} {text}"] = ["bench", "storage", ".", option, text]
    for name in ("nonsense", "gpu,nonsense", ","):
        others[f"bench step --suite {name}"] = ["bench", "step", "--suite", name]
    for text in ("512", "2x", "0x512", "2x1", "axb", "2x512x1", "9" * 30 + "x2"):
        others[f"bench step --batch {text}"] = ["bench", "step", "--batch", text]
    yield from each("arguments", others, words)
