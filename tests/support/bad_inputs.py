"""A catalogue of what a command may be given by mistake or malice: each input is bad, and none may end in a traceback.

`python tests/support/bad_inputs.py` runs all of it and writes docs/results/bad-inputs.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bad_model_files import CODE_1, CONFIG, damaged_configs, damaged_headers, damaged_indexes, damaged_tokenizers
from bad_run_files import damaged_manifests, damaged_run_files, make_run
from recipe_texts import recipe_text

from app.recipe_fields import fields

RECIPE = recipe_text()
DEEP = 100_000
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
    from app.cli import main

    before = os.getcwd()
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    try:
        arguments = bad.make(folder)
        files = _files(folder)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        return Outcome(code, out.getvalue(), err.getvalue(), _strange(files, _files(folder)))
    finally:
        os.chdir(before)


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


def _content(name: str, content: bytes | str, *before: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [*(before or ("plan",)), name]

    return make


def _recipes() -> Iterator[Bad]:
    python: dict[str, bytes | str] = {
        "empty": "",
        "no recipe": "x = 1\n",
        "recipe of another type": "recipe = {}\n",
        "the class itself": "from app.recipe import Recipe\nrecipe = Recipe\n",
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
        "unknown section": "from app.recipe import Recipe\nrecipe = Recipe(name='x', modle=1)\n",
        "unknown field": "from engine.config import TrainConfig\nTrainConfig(step=1)\n",
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
    for name, content in python.items():
        yield Bad("recipe file", f"python: {name}", _content("bad.py", content))
    tree: dict[str, Any] = {"name": "x", "model": {"num_layers": 1, "hidden_size": 8, "vocab_size": 9}}
    trees: dict[str, Any] = {
        "a list": [],
        "a number": 5,
        "null": None,
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
        "empty": "",
        "white space": " \n",
        "torn": '{"name": "x", "train": {"st',
        "two values": '{"name": "x"} {}',
        "a comma too many": '{"name": "x",}',
        "deep lists": "[" * DEEP,
        "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
        "deep overrides": '{"name": "x", "model": {"overrides": {"a": ' + "[" * 5000 + "]" * 5000 + "}}}",
        "not UTF-8": b'{"name": "\xff"}',
        "UTF-16": '{"name": "x"}'.encode("utf-16"),
        "digits": '{"name": "x", "train": {"steps": ' + "9" * 5000 + "}}",
        "zero bytes": b"\0" * 100,
    }
    for name, content in texts.items():
        yield Bad("recipe file", f"json: {name}", _content("bad.json", content))
    places: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "a folder": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
        "a loop of links": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a device": lambda path: path.symlink_to("/dev/zero"),
    }
    for name, place in places.items():

        def make(folder: Path, place: Callable[[Path], object] = place) -> list[str]:
            place(folder / "bad.json")
            return ["train", "bad.json"]

        yield Bad("recipe file", name, make)


_GOOD = {"data.seed": ("0",), "train.seed": ("-1",)}
_NO_NUMBERS = ("x", "", " ", "1,5", "0x10", "--1", "1e400", "nan", "inf", "-inf", "²", "١x", "[1]", "{}", "1 2")


def _settings() -> Iterator[Bad]:
    """Every field with values that its type or its meaning does not take."""
    for field in fields():
        hint, values = str(field.type), []
        if field.key in ("budgets.gpu", "budgets.ram", "budgets.nvme", "storage.part_bytes"):
            values = ["0", "-1", "12 apples", "1e3GiB", "9" * 40, "nan"]
        elif "bool" in hint:
            values = ["maybe", "2"]
        elif "int" in hint and "str" not in hint:
            values = ["x", "1.5", "9" * 25, "9" * 5000] + (["1e23"] if "float" not in hint else [])
            values += [] if field.key == "train.seed" else ["-1"]
        elif "float" in hint:
            values = ["x", "nan", "inf", "1e999"]
            values += [] if field.key in ("train.lr", "train.weight_decay") else ["-1"]
        elif "Literal" in hint:
            values = ["sideways"]
        elif "dict" in hint:
            values = ["[1", "7", "{" * 5000, '{"a": NaN}', "null"]
        for value in values:
            shown = value if len(value) < 20 else f"{value[:6]}... ({len(value)} characters)"
            yield Bad("--set", f"{field.key}={shown}", _set(f"{field.key}={value}"))
    for value in _NO_NUMBERS:
        yield Bad("--set", f"train.steps={value!r}", _set(f"train.steps={value}"))
    others = {
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
        "a path of a zero byte": "data.path=a\0b",
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
        "more validation than data": "data.validation_documents=10",
        "validation without documents": "train.validate_every=1",
        "a chunk of odd bytes": "storage.part_bytes=4097",
    }
    for name, value in others.items():
        extra = ["--set", "data.max_documents=5"] if name == "more validation than data" else []
        yield Bad("--set", name, lambda folder, v=value, e=extra: ["plan", tiny(folder), "--set", v, *e])  # type: ignore[misc]


def _set(text: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["plan", tiny(folder), "--set", text]


def _configs() -> Iterator[Bad]:
    for name, content in damaged_configs().items():
        # What transformers takes and cannot compute with is a refusal: exit code 1.
        code = 1 if name in CODE_1 else 2
        yield Bad("config.json", name, _content("config.json", content, "check"), code=code)
    for name, place in _odd_files().items():

        def make(folder: Path, place: Callable[[Path], object] = place) -> list[str]:
            (folder / "model").mkdir()
            place(folder / "model" / "config.json")
            return ["check", "model"]

        yield Bad("config.json", name, make)


def _odd_files() -> dict[str, Callable[[Path], object]]:
    """What stands in a folder in place of a file."""

    def outside(path: Path) -> None:
        secret = path.parent.parent / "outside"
        secret.write_text(json.dumps(CONFIG))
        path.symlink_to(secret)

    return {
        "missing": lambda path: None,
        "a folder": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
        "a link out of the folder": outside,
        "a link within the folder": lambda path: path.symlink_to("README.md"),
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a loop of links": lambda path: path.symlink_to(path),
    }


def _model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    return model


def _train_model(folder: Path) -> list[str]:
    tiny(folder)
    shape = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    settings = ["model.path=model", "data.source=random", "train.compute_dtype=float32"]
    settings += [f"model.{name}=none" for name in shape]
    return ["train", "tiny.py", *(part for setting in settings for part in ("--set", setting))]


def _weights() -> Iterator[Bad]:
    for name, content in damaged_headers().items():

        def header(folder: Path, content: bytes = content) -> list[str]:
            (_model(folder) / "model.safetensors").write_bytes(content)
            return _train_model(folder)

        yield Bad("model folder", f"header: {name}", header)
    for name, text in damaged_indexes().items():

        def index(folder: Path, text: bytes = text) -> list[str]:
            model = _model(folder)
            (model / "a.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
            (model / "model.safetensors.index.json").write_bytes(text)
            return _train_model(folder)

        yield Bad("model folder", f"index: {name}", index)
    for name, place in _odd_files().items():

        def odd(folder: Path, place: Callable[[Path], object] = place) -> list[str]:
            place(_model(folder) / "model.safetensors")
            return _train_model(folder)

        yield Bad("model folder", f"weights: {name}", odd)
    for name in ("pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00001.bin", "consolidated.pth"):

        def pickled(folder: Path, name: str = name) -> list[str]:
            (_model(folder) / name).write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")
            return _train_model(folder)

        yield Bad("model folder", f"pickle: {name}", pickled)


def _tokenizers() -> Iterator[Bad]:
    for name, files in damaged_tokenizers().items():

        def make(folder: Path, files: dict[str, bytes] = files) -> list[str]:
            (folder / "tokens").mkdir()
            for file, content in files.items():
                (folder / "tokens" / file).write_bytes(content)
            return ["train", tiny(folder), "--set", "data.tokenizer=tokens"]

        yield Bad("tokenizer", name, make)
    for name, place in _odd_files().items():

        def odd(folder: Path, place: Callable[[Path], object] = place) -> list[str]:
            (folder / "tokens").mkdir()
            place(folder / "tokens" / "tokenizer.json")
            return ["train", tiny(folder), "--set", "data.tokenizer=tokens"]

        yield Bad("tokenizer", f"tokenizer.json: {name}", odd)


def _texts() -> Iterator[Bad]:
    lines: dict[str, bytes] = {
        "empty": b"",
        "white space": b"\n \n\t\n",
        "empty texts": b'{"text": ""}\n{"text": " "}\n',
        "no JSON": b"hello\n",
        "torn": b'{"text": "a',
        "a list": b'["text"]\n',
        "a text": b'"text"\n',
        "null": b"null\n",
        "no text": b'{"content": "a"}\n',
        "a number for the text": b'{"text": 5}\n',
        "a list for the text": b'{"text": ["a"]}\n',
        "null for the text": b'{"text": null}\n',
        "half a character": b'{"text": "\\ud800"}\n',
        "half a character in another field": b'{"text": "a", "x": "\\udfff"}\n',
        "not UTF-8": b'{"text": "\xff"}\n',
        "UTF-16": '{"text": "a"}\n'.encode("utf-16"),
        "deep lists": b"[" * DEEP + b"\n",
        "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n",
        "deep in another field": b'{"text": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
        "zero bytes": b"\0" * 1000 + b"\n",
        "two values in a line": b'{"text": "a"} {"text": "b"}\n',
        "digits": b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n",
        "a line that does not end": b'{"text": "' + b"a" * (65 << 20),
    }
    for name, content in lines.items():
        yield Bad("text data", f"jsonl: {name}", _data("jsonl", "bad.jsonl", content))
    texts = {
        "empty": b"",
        "white space": b"\n \t\n",
        "not UTF-8": b"caf\xe9\n",
        "UTF-16": "hello".encode("utf-16"),
        "a torn character": b"a\xe2\x82",
        "half a character": b"\xed\xa0\x80",
        "bytes": bytes(range(256)),
    }
    for name, content in texts.items():
        yield Bad("text data", f"text: {name}", _data("text", "bad.txt", content))
    for source in ("text", "jsonl"):
        for name, place in _odd_files().items():
            if name == "a link out of the folder":
                continue  # data may lie anywhere

            def odd(folder: Path, place: Callable[[Path], object] = place, source: str = source) -> list[str]:
                (folder / "texts").mkdir()
                place(folder / "texts" / f"bad.{source}")
                recipe = tiny(folder)
                path = f"texts/bad.{source}"
                return ["plan", recipe, "--set", f"data.source={source}", "--set", f"data.path={path}"]

            yield Bad("text data", f"{source}: {name}", odd)


def _data(source: str, name: str, content: bytes) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return ["plan", tiny(folder), "--set", f"data.source={source}", "--set", f"data.path={name}"]

    return make


def _runs() -> Iterator[Bad]:
    for name, (arguments, damage) in damaged_run_files().items():

        def make(
            folder: Path, arguments: list[str] = arguments, damage: Callable[[Path], object] = damage
        ) -> list[str]:
            damage(make_run(folder / "runs" / "r", RECIPE))
            return [*arguments[:1], "r", *arguments[1:]]

        yield Bad("run directory", f"{arguments[0]}: {name}", make)
    for command in ("resume", "pause", "stop", "checkpoint", "scrub", "lanes", "trace"):
        for name in ("nothing-here", "..", "a" * 300, "a\0b", HOSTILE):
            shown = "a long name" if len(name) > 100 else repr(name)
            yield Bad("run directory", f"{command}: no run {shown}", lambda folder, c=command, n=name: [c, n])  # type: ignore[misc]


def _manifests() -> Iterator[Bad]:
    for name, content in damaged_manifests().items():

        def make(folder: Path, content: bytes = content) -> list[str]:
            (make_run(folder / "runs" / "r", RECIPE) / "state" / "manifest.json").write_bytes(content)
            return ["scrub", "r"]

        yield Bad("manifest", name, make)
    for name, place in _odd_files().items():

        def odd(folder: Path, place: Callable[[Path], object] = place) -> list[str]:
            manifest = make_run(folder / "runs" / "r", RECIPE) / "state" / "manifest.json"
            manifest.unlink()
            place(manifest)
            return ["scrub", "r"]

        yield Bad("manifest", name, odd)


def _places() -> Iterator[Bad]:
    def file(folder: Path) -> str:
        (folder / "file").write_text("mine\n")
        return "file"

    def full(folder: Path) -> str:
        (folder / "full").mkdir()
        (folder / "full" / "mine").write_text("mine\n")
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
    for name, place in places.items():
        yield Bad(
            "places", f"--run-dir: {name}", lambda folder, p=place: ["train", tiny(folder), "--run-dir", p(folder)]
        )  # type: ignore[misc]
        yield Bad("places", f"probe --save: {name}", lambda folder, p=place: ["probe", "--save", f"{p(folder)}/x"])  # type: ignore[misc]
        yield Bad("places", f"probe: {name}", lambda folder, p=place: ["probe", p(folder), "--save", "x.json"])  # type: ignore[misc]
        yield Bad("places", f"bench storage: {name}", lambda folder, p=place: ["bench", "storage", p(folder)])  # type: ignore[misc]
        if name not in ("a file", "a loop of links"):  # replaced, like any file of that name
            yield Bad("places", f"trace --out: {name}", _out("trace", "-o", place))
        yield Bad("places", f"export: {name}", _out("export", "", place))
    yield Bad(
        "places", "--run-dir: a folder with a file", lambda folder: ["train", tiny(folder), "--run-dir", full(folder)]
    )
    yield Bad("places", "export: a folder with a file", _out("export", "", full))
    yield Bad("places", "trace --out: a folder", _out("trace", "-o", full))
    yield Bad("places", "trace --out: nothing", _out("trace", "-o", lambda folder: ""))


def _out(command: str, option: str, place: Callable[[Path], str]) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        make_run(folder / "runs" / "r", RECIPE)
        return [command, "r", *([option] if option else []), place(folder)]

    return make


def _machines() -> Iterator[Bad]:
    from engine.machine.presets import GENERIC

    good = GENERIC.to_json()
    values: dict[str, Any] = {
        "a list": [],
        "null": None,
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
    texts: dict[str, bytes | str] = {name: json.dumps(value) for name, value in values.items()} | {
        "empty": "",
        "torn": '{"version": 1',
        "deep lists": "[" * DEEP,
        "not UTF-8": b"\xff",
        "half a character": json.dumps(good | {"name": "\ud800"}),
    }
    for name, content in texts.items():

        def make(folder: Path, content: bytes | str = content) -> list[str]:
            (folder / "m.json").write_bytes(content if isinstance(content, bytes) else content.encode())
            return ["plan", tiny(folder), "--machine", "m.json"]

        yield Bad("machine profile", name, make)
    for name in ("rtx9090", "", "/", "a\0b", "a" * 5000, HOSTILE):
        if name:
            shown = repr(name) if len(name) < 100 else "a long name"
            yield Bad("machine profile", f"no machine {shown}", lambda f, n=name: ["plan", tiny(f), "--machine", n])  # type: ignore[misc]


def _arguments() -> Iterator[Bad]:
    commands = {
        "train": 1, "plan": 1, "resume": 1, "pause": 1, "stop": 1, "checkpoint": 1, "scrub": 1, "lanes": 1, "check": 1,
        "export": 2, "trace": 1, "runs": 0, "probe": 0, "bench step": 0, "bench memory": 0, "bench attention": 0,
        "bench storage": 1, "bench plan": 0, "bench planned": 0,
    }  # fmt: skip
    for command, required in commands.items():
        words = command.split()
        yield Bad("arguments", f"{command} --nonsense", lambda f, w=words: [*w, "--nonsense"], usage=True)  # type: ignore[misc]
        if required:
            yield Bad("arguments", f"{command} without its argument", lambda f, w=words: w, usage=True)  # type: ignore[misc]
        if command not in ("probe", "bench storage"):
            many = ["x"] * (required + 2)
            yield Bad("arguments", f"{command} with too many", lambda f, w=words, m=many: [*w, *m], usage=True)  # type: ignore[misc]
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
    for name, arguments in usages.items():
        yield Bad("arguments", name, lambda f, a=arguments: a, usage=True)  # type: ignore[misc]
    for text in ("5", "5:", ":5", "a:b", "1:2:3", "²:³", "-1:5", "1.5:2", "9" * 5000 + ":1", "٣:٤", HOSTILE, ""):
        shown = repr(text) if len(text) < 100 else "digits"
        for command in ("lanes", "trace"):
            if text or command == "trace":
                yield Bad("arguments", f"{command} --steps {shown}", _steps(command, text))
    for option in ("--size", "--chunk"):
        for text in ("0", "-1", "big", "9" * 30, "nan"):
            yield Bad(
                "arguments",
                f"bench storage {option} {text}",
                lambda f, o=option, t=text: ["bench", "storage", ".", o, t],
            )  # type: ignore[misc]
    for name in ("nonsense", "gpu,nonsense", ","):
        yield Bad("arguments", f"bench step --suite {name}", lambda f, n=name: ["bench", "step", "--suite", n])  # type: ignore[misc]
    yield Bad("arguments", "half a character", lambda folder: ["train", "\udcff.py"])


def _steps(command: str, text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        make_run(folder / "runs" / "r", RECIPE)
        return [command, "r", "--steps", text]

    return make


# ---------------------------------------------------------------- the page


def write_page(page: Path) -> int:
    """Run all inputs and write the table; the number of those that were not taken well."""
    rows: dict[str, list[tuple[Bad, Outcome]]] = {}
    failed = 0
    for bad in catalogue():
        with tempfile.TemporaryDirectory() as folder:
            found = run(bad, Path(folder))
        rows.setdefault(bad.family, []).append((bad, found))
        if wrong := faults(bad, found):
            failed += 1
            print(f"{bad.family}: {bad.name}: {', '.join(wrong)}\n    {found.err[-500:]}", file=sys.stderr)
    lines = [
        "# Bad inputs",
        "",
        "What each command makes of input that is damaged or hostile: `python tests/support/bad_inputs.py` runs the",
        "catalogue (tests/app/test_bad_inputs_all.py) through the real command line and writes this page.",
        "",
        "| family | inputs | exit codes | tracebacks | examples |",
        "|---|---|---|---|---|",
    ]
    for family, items in rows.items():
        codes = Counter(found.code for _, found in items)
        traces = sum("Traceback" in found.out + found.err for _, found in items)
        examples = "; ".join(bad.name.replace("|", "/") for bad, _ in items[:: max(1, len(items) // 4)][:4])
        shown = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
        lines.append(
            f"| {family} | {len(items)} | {shown} | {traces} | {examples.encode('ascii', 'replace').decode()} |"
        )
    total = sum(map(len, rows.values()))
    lines += ["", f"{total} inputs; {failed} were not taken as promised: one message, nothing else written."]
    page.write_text("\n".join(lines) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, write_page(Path(__file__).parents[2] / "docs" / "results" / "bad-inputs.md")))
