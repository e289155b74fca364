"""What a stranger may hand to Penstock, and a command that reads it: each kind of file as it is right, and spoilt."""

import bz2
import gzip
import io
import json
import lzma
import random
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import hostile
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from bad_run_files import signed
from chat_model import TEMPLATE, make_chat_model, talk
from peft import LoraConfig, get_peft_model
from pyarrow import ipc
from recipe_texts import TINY, recipe_text
from transformers import AutoModelForCausalLM

from penstock.app.cli.main import main
from penstock.engine.cluster.layout import checksums_of
from penstock.storage.files.sealed import seal


class Spoil:
    """Files as they are right, or, where there is a seed, spoilt."""

    def __init__(self, seed: int | None) -> None:
        self._chance = None if seed is None else random.Random(seed)

    def json(self, value: Any) -> bytes:
        return json.dumps(value).encode() if self._chance is None else hostile.of_json(value, self._chance)

    def sealed(self, value: dict[str, Any], sign: Callable[[dict[str, Any]], bytes]) -> bytes:
        """A JSON object with a checksum, which more often than not is right."""
        value = {name: item for name, item in value.items() if name not in ("crc32c", "checksum")}
        content = self.json(value)
        if self._chance is not None and self._chance.random() < 0.3:
            return content
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return content
        return sign(found) if isinstance(found, dict) else content

    def lines(self, rows: list[Any]) -> bytes:
        plain = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        return plain if self._chance is None else hostile.of_lines(rows, self._chance)

    def text(self, content: str | bytes) -> bytes:
        content = content.encode() if isinstance(content, str) else content
        return content if self._chance is None else hostile.of_text(content, self._chance)

    def bytes(self, content: bytes) -> bytes:
        return content if self._chance is None else hostile.of_bytes(content, self._chance)

    def template(self, good: str) -> str:
        return good if self._chance is None else hostile.template(good, self._chance)

    def choice(self, options: Any) -> Any:
        """One of some; without a seed the first."""
        options = list(options)
        return options[0] if self._chance is None else self._chance.choice(options)


def make_goods(folder: Path) -> Path:
    """A model, an adapter of it, a run and a DCP checkpoint of it, which commands read as they are."""
    make_chat_model(folder / "model", max_position_embeddings=8192)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        str(folder / "adapter")
    )
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("def a(): pass\n" * 40)
    (folder / "tiny.py").write_text(recipe_text(data={"path": str(folder / "corpus")}, train={"steps": 3}))
    assert main(["train", str(folder / "tiny.py"), "--run-dir", str(folder / "run")]) == 0
    assert main(["export", str(folder / "run"), str(folder / "dcp"), "--format", "dcp"]) == 0
    return folder


ROWS: tuple[list[dict[str, Any]], ...] = (
    [talk(number, 1 + number % 3) for number in range(12)],
    [{"text": f"row {number} of text", "at": datetime(2026, 1, 1 + number), "n": number / 3} for number in range(12)],
    [{"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "yes"}]} for n in range(12)],
    [{"prompt": f"{number} is ", "completion": f"a number of {number}"} for number in range(12)],
    [{"input_ids": [number, 5, 6, 7], "labels": [-100, 5, 6, 7]} for number in range(12)],
    [{"instruction": f"say {number}", "input": "", "output": f"{number}"} for number in range(12)],
)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress
}  # fmt: skip


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: str(v) if isinstance(v, datetime) else v for key, v in row.items()} for row in rows]


def _texts(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    """Rows and texts in every container that is text, compressed or not."""
    rows = _plain(spoil.choice(ROWS))
    ending, packing = spoil.choice((".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".txt")), spoil.choice(PACKED)
    if ending in (".jsonl", ".ndjson"):
        content = spoil.lines(rows)
    elif ending == ".json":
        content = spoil.json(spoil.choice((rows, {"version": 1, "data": rows})))
    elif ending == ".txt":
        content = spoil.text("A line of text.\n" * 30)
    else:
        mark = "," if ending == ".csv" else "\t"
        lines = [mark.join(rows[0])]
        lines += [mark.join('"' + str(v).replace('"', '""') + '"' for v in row.values()) for row in rows]
        content = spoil.text("\n".join(lines))
    content = PACKED[packing](content)
    if packing and spoil.choice((False, True, False)):
        content = spoil.bytes(content)
    name = f"rows{ending}{packing}"
    (folder / name).write_bytes(content)
    return ["data", str(good / "model"), name]


def _columns(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    """Rows in every container that is binary."""
    table = pa.Table.from_pylist(spoil.choice(ROWS))
    if spoil.choice((False, True)):
        table = table.append_column("zone", pa.array([0] * 12, pa.timestamp("s", "Europe/Rome")))
        table = table.append_column("word", pa.array(["a", "b", None] * 4).dictionary_encode())
    ending, out = spoil.choice((".parquet", ".arrow", ".feather")), io.BytesIO()
    if ending == ".parquet":
        kind = spoil.choice(({}, {"use_dictionary": False, "compression": "none"}, {"compression": "zstd"}))
        pq.write_table(table, out, **kind)
    else:
        options = ipc.IpcWriteOptions(compression=spoil.choice((None, "zstd", "lz4", None)))
        new = spoil.choice((ipc.new_stream, ipc.new_file))
        with new(out, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=5)
    (folder / f"rows{ending}").write_bytes(spoil.bytes(out.getvalue()))
    return ["data", str(good / "model"), f"rows{ending}"]


HEAD = (
    "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: 'a*'\n"
    "  - split: test\n    path: [b.jsonl]\n"
)


def _folder(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    """A folder of data: a hub's README.md, or what `datasets` writes beside its rows."""
    data = folder / "data"
    data.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (data / name).write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[0]))
    if spoil.choice((True, False)):
        (data / "README.md").write_bytes(b"---\nlicense: mit\n" + spoil.text(HEAD) + b"---\n# A data set\n")
        return ["data", str(good / "model"), "data"]
    (data / "train").mkdir()
    (data / "dataset_dict.json").write_bytes(spoil.json({"splits": ["train"]}))
    table = pa.Table.from_pylist(ROWS[0])
    with ipc.new_stream(str(data / "train" / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train", "_type": None}
    (data / "train" / "state.json").write_bytes(spoil.json(state))
    (data / "train" / "dataset_info.json").write_text("{}")
    return ["data", str(good / "model"), "data"]


def _copy(good: Path, folder: Path, name: str) -> Path:
    return Path(shutil.copytree(good / name, folder / name))


def _spoil_file(path: Path, spoil: Spoil) -> None:
    """A JSON file, whose parts become others."""
    path.write_bytes(spoil.json(json.loads(path.read_bytes())))


def _tokenizer(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    model = _copy(good, folder, "model")
    _spoil_file(model / spoil.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json")), spoil)
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[0]))
    return ["data", "model", "talks.jsonl"]


def _template(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    model = _copy(good, folder, "model")
    text = spoil.template(TEMPLATE)
    (model / "chat_template.jinja").write_text(text, errors="replace")
    if spoil.choice((False, True, False)):
        (model / "chat_template.jinja").unlink()
        (model / "chat_template.json").write_bytes(spoil.json({"chat_template": text}))
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[0]))
    return ["data", "model", "talks.jsonl"]


def _config(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    model = _copy(good, folder, "model")
    _spoil_file(model / spoil.choice(("config.json", "config.json", "generation_config.json")), spoil)
    return spoil.choice((["plan", "model"], ["check", "model"], ["plan", "model", "--json"]))


def _weights(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    """A safetensors header, its data, or an index."""
    model = _copy(good, folder, "model")
    path = model / "model.safetensors"
    _spoil_safetensors(path, spoil)
    if spoil.choice((False, True, False)):
        path.rename(model / "model-00001-of-00001.safetensors")
        names = _header(good / "model" / "model.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (model / "model.safetensors.index.json").write_bytes(spoil.json(index))
    return ["sample", "model", "--prompt", "a", "--tokens", "2"]


def _header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    found = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {name: item for name, item in found.items() if name != "__metadata__"}


def _spoil_safetensors(path: Path, spoil: Spoil) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    if spoil.choice((True, False)):
        header = spoil.json(json.loads(content[8:end]))
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    else:
        path.write_bytes(spoil.bytes(content[:end]) + content[end:])


def _adapter(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    adapter = _copy(good, folder, "adapter")
    (adapter / "README.md").unlink(missing_ok=True)
    if spoil.choice((True, False)):
        _spoil_file(adapter / "adapter_config.json", spoil)
    else:
        _spoil_safetensors(adapter / "adapter_model.safetensors", spoil)
    recipe = {
        **{name: TINY[name] for name in ("train", "budgets", "storage")},
        "name": "x",
        "model": {"path": str(good / "model")},
        "data": {"source": "text", "path": str(good / "corpus"), "sequence_length": 64},
        "adapter": {"method": "lora", "rank": 2, "alpha": 8.0, "targets": ["q_proj"], "start": "adapter"},
    }
    recipe["budgets"] = {"gpu": "4MiB", "ram": "8MiB", "nvme": "64MiB"}
    (folder / "adapt.json").write_text(json.dumps(recipe))
    return ["train", "adapt.json", "--run-dir", "out"]


def _recipe(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    tree = {"name": "x", **TINY} | {"data": TINY["data"] | {"path": str(good / "corpus")}}
    (folder / "recipe.json").write_bytes(spoil.json(tree))
    return ["plan", "recipe.json"]


def _run(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    """A run directory, of which one file is spoilt."""
    run = _copy(good, folder, "run")
    names = (
        "recipe.json",
        "status.json",
        "metrics.jsonl",
        "spans.jsonl",
        "log.jsonl",
        "plan.json",
        "state/manifest.json",
    )
    path = run / spoil.choice([name for name in names if (run / name).is_file()])
    if path.name == "manifest.json":
        path.write_bytes(spoil.sealed(json.loads(path.read_bytes()), signed))
    elif path.name == "recipe.json":
        path.write_bytes(spoil.sealed(json.loads(path.read_bytes()), lambda value: json.dumps(seal(value)).encode()))
    elif path.suffix == ".jsonl":
        path.write_bytes(spoil.lines([json.loads(line) for line in path.read_text().splitlines()]))
    else:
        _spoil_file(path, spoil)
    commands = (["lanes"], ["trace"], ["scrub"], ["export", "out"], ["checkpoint", "now"], ["pause"])
    commands += (["resume", "--set", "train.steps=4"],)
    command, *rest = spoil.choice(commands)
    return [command, "run", *rest]


def _dcp(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    """A DCP checkpoint's record, its index, which is a pickle, or its checksums."""
    dcp = _copy(good, folder, "dcp")
    path = dcp / spoil.choice(("penstock.json", ".metadata", "checksums.json"))
    if path.name == ".metadata":
        path.write_bytes(spoil.bytes(path.read_bytes()))
        sums = {name: list(found) for name, found in checksums_of(dcp).items()}
        (dcp / "checksums.json").write_text(json.dumps(seal({"files": sums})))
    else:
        path.write_bytes(spoil.sealed(json.loads(path.read_bytes()), lambda value: json.dumps(seal(value)).encode()))
    return ["import-dcp", "dcp", "--run-dir", "back"]


def _machine(good: Path, folder: Path, spoil: Spoil) -> list[str]:
    from penstock.engine.machine.presets import GENERIC

    (folder / "machine.json").write_bytes(spoil.json(GENERIC.to_json()))
    return ["plan", str(good / "tiny.py"), "--machine", "machine.json"]


KINDS: dict[str, tuple[Callable[[Path, Path, Spoil], list[str]], int]] = {
    "data that is text": (_texts, 10),
    "data in columns": (_columns, 10),
    "data folder": (_folder, 4),
    "tokenizer": (_tokenizer, 6),
    "chat template": (_template, 8),
    "config.json": (_config, 6),
    "weights": (_weights, 5),
    "adapter": (_adapter, 4),
    "recipe": (_recipe, 6),
    "run directory": (_run, 6),
    "DCP checkpoint": (_dcp, 3),
    "machine profile": (_machine, 2),
}
"""Name -> what writes its files into a folder and returns a command that reads them, and its share of all inputs."""


def kind_of(number: int) -> str:
    """The kind of input `number`, which is also its seed."""
    shares = [name for name, (_, share) in KINDS.items() for _ in range(share)]
    return shares[number * 29 % len(shares)]
