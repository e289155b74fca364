"""Files of data that a stranger has prepared: heads that expand, compressed files that only repeat, absurd numbers."""

import bz2
import gzip
import json
import lzma
import time
from pathlib import Path

import pytest
import zstandard

from penstock.engine.config import DataConfig
from penstock.engine.data.files import base
from penstock.engine.data.files.base import read_rows
from penstock.engine.data.files.splits import find_splits, read_configs
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.data.samples import BadRows
from penstock.storage.files.errors import UserError


def readme(folder: Path, configs: str) -> Path:
    (folder / "README.md").write_text(f"---\nlicense: mit\n{configs}\ndataset_info: {{}}\n---\n# A data set\n")
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "b.jsonl").write_text('{"text": "b"}\n')
    return folder


BOMB = "configs:\n- &l0 [a, a, a, a, a, a, a, a, a, a]\n" + "".join(
    f"- &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
HEADS = {
    "references": (BOMB, "an anchor"),
    "one reference": ("configs: *x", "an alias"),
    "a tag": ("configs: !!python/object/apply:os.system [ls]", "a tag"),
    "nested": ("configs: " + "[" * 500 + "]" * 500, "nested too deep"),
    "long": ("configs:\n" + "- data_files: a.jsonl\n" * 60_000, "longer than 1 MiB"),
    "many": ("configs: [" + "a," * 300_000 + "]", "too many"),
    "patterns": ("configs:\n- data_files: [" + ", ".join(f"{n}*" for n in range(600)) + "]", "more patterns"),
    "a slow pattern": ("configs:\n- data_files: '" + "**/*/" * 30 + "'", "more patterns"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_more_than_a_list_of_files_is_refused(tmp_path: Path, name: str) -> None:
    configs, said = HEADS[name]
    with pytest.raises(UserError, match=rf"README\.md: .*{said}.*; give a file"):
        find_splits(readme(tmp_path, configs))


def test_heads_as_they_are_published(tmp_path: Path) -> None:
    block = (
        "configs: # two splits\n- config_name: default\n  data_files:\n\n  - split: train\n    path: 'a*'\n"
        "  - split: test\n    path: b.jsonl\n"
    )
    flow = 'configs: [{config_name: default, data_files: [{split: train, path: ["a.jsonl"]}, {split: test, path: b*}]}]'
    for configs in (block, flow):
        folder = readme(tmp_path, configs)
        wanted = {"train": [folder / "a.jsonl"], "test": [folder / "b.jsonl"]}
        assert find_splits(folder) == wanted
    for text in (
        "",
        "---",
        "---\nconfigs: [a\n---\n",
        "---\nconfigs: a",
        "---\n\n\n# no end",
        "--- a\nconfigs: a\n---",
    ):
        assert read_configs(text) == []
    assert read_configs("---\r\nconfigs:\r\n- a\r\nother: b\r\n---\r\n") == ["a"]
    assert read_configs("---\nx: &a 5\ny: *a\nconfigs: [a]\n---\n") == ["a"], "what else stands there is not read"


def test_a_split_of_which_a_file_is_missing_is_refused(tmp_path: Path) -> None:
    files = "  - split: train\n    path: [a.jsonl, c.jsonl]\n"
    folder = readme(tmp_path, f"configs:\n- config_name: a\n  data_files:\n{files}")
    with pytest.raises(UserError, match=r"README.md lists c.jsonl in split train, which is not there beside the other"):
        find_splits(folder)


def test_a_head_of_blank_lines_takes_no_time() -> None:
    begin = time.process_time()
    assert read_configs("---" + "\n" * 200_000 + "x") == []
    assert time.process_time() - begin < 20, "it was minutes, by the square of the lines"


def test_splits_lead_to_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "set").mkdir()
    for name in ("../other", str(tmp_path / "other"), ".", ""):
        (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
        with pytest.raises(UserError, match="lists splits that do not exist"):
            find_splits(tmp_path / "set")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_that_only_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(base, "FEW_BYTES", 1 << 16)
    content = b'{"text": "%s"}\n' % (b"a" * 1000) * 2000
    ways = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(ways[ending](content))
    with pytest.raises(UserError, match=rf"a\.jsonl\{ending}: becomes more than 250 times .*decompress it yourself"):
        sum(1 for _ in read_rows(file, BadRows()))
    monkeypatch.undo()
    assert sum(1 for _ in read_rows(file, BadRows())) == 2000


LONG = "9" * 5000
NUMBERS = {
    ".json": [f'[{{"text": "a"}}, {{"text": "b", "n": {LONG}}}]', f'{{"x": {LONG}, "rows": [{{"text": "a"}}]}}'],
    ".jsonl": [f'{{"text": "a", "n": {LONG}}}\n'],
}


@pytest.mark.parametrize(("ending", "content"), [(e, c) for e, contents in NUMBERS.items() for c in contents])
def test_a_number_of_thousands_of_digits(tmp_path: Path, ending: str, content: str) -> None:
    (tmp_path / f"a{ending}").write_text(content)
    with pytest.raises(UserError, match=rf"a{ending}:1: .*digits"):
        list(read_rows(tmp_path / f"a{ending}", BadRows()))


@pytest.mark.parametrize("weight", ["1e300", "1e-300", "9" * 400, "1e7", "-1", "NaN", "Infinity", '"1"'])
def test_a_weight_that_fp32_does_not_sum(tmp_path: Path, weight: str) -> None:
    talk = f'{{"messages": [{{"role": "assistant", "content": "a", "weight": {weight}}}]}}'
    tokens = f'{{"input_ids": [1, 2], "weights": [1, {weight}]}}'
    for source, line in (("messages", talk), ("tokens", tokens)):
        (tmp_path / "a.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match=r"a\.jsonl:1.*weight.*expected 0, or a number from 1e-6 to 1e6"):
            list(read_samples(DataConfig(source=source, path=str(tmp_path / "a.jsonl"))))


def test_a_table_of_more_columns_than_anybody_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(map(str, range(200_000))) + "\n")
    with pytest.raises(UserError, match=r"a\.csv:1: 200,000 columns; the most is 10,000"):
        list(read_rows(tmp_path / "a.csv", BadRows()))


def test_half_a_frame_is_not_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"a" * 100)[:-3])
    with pytest.raises(UserError, match=r"not a whole \.zst file"), base.open_bytes(tmp_path / "a.txt.zst") as stream:
        stream.read()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_nothing_but_empty_lines_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(base, "_MOST_EMPTY", 10)
    first = {"a.csv": "text\none\n"}.get(name, '{"text": "one"}\n')
    (tmp_path / name).write_text(first + "\n" * 10 + "\r\n")
    with pytest.raises(UserError, match=f"{name}:.*: more than 10 empty lines in a row; remove them"):
        list(base.read_rows(tmp_path / name, BadRows("refuse")))
    (tmp_path / name).write_text(first + "\n" * 10)
    assert [row.fields for row in base.read_rows(tmp_path / name, BadRows("refuse"))] == [{"text": "one"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_name_that_a_row_has_twice_is_refused(tmp_path: Path, name: str) -> None:
    """As pyarrow refuses it: one of the two would be left out without a word."""
    row = '{"text": "one", "text": "two"}'
    (tmp_path / name).write_text(f"[{row}]" if name == "a.json" else f"{row}\n{row}\n")
    with pytest.raises(UserError, match=f"{name}:1: .*'text' appears twice"):
        list(base.read_rows(tmp_path / name, BadRows("refuse")))
