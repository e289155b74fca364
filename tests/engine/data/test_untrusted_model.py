"""Tokenizers and texts from anybody: what is opened, run and held in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from penstock.engine.config import DataConfig
from penstock.engine.data.files import base
from penstock.engine.data.formats import text as text_format
from penstock.engine.data.reading import read_samples
from penstock.engine.data.tokenizer import load_tokenizer, train_tokenizer
from penstock.engine.hf.weights import _copied_names
from penstock.storage.errors import UserError
from penstock.storage.model_folder import read_model_file


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    train_tokenizer(["def a(): pass\n" * 40], 300, tmp_path / "tokens")
    return tmp_path / "tokens"


def test_a_tokenizer_of_the_hub_s_cache_is_read(tmp_path: Path, trained: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("ab" * 20)
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(trained.iterdir())):
        digest = f"{number:064x}"
        (blobs / digest).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    assert load_tokenizer(snapshot).fingerprint == load_tokenizer(trained).fingerprint


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_links_of_a_tokenizer_s_folder_are_not_followed(tmp_path: Path, trained: Path, name: str) -> None:
    (tmp_path / "outside").write_text("{}")
    (trained / name).unlink(missing_ok=True)
    (trained / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=f"{name}: it is a symbolic link"):
        load_tokenizer(trained)


def test_code_that_a_folder_brings_is_neither_run_nor_asked_about(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("transformers asks whether to run it")

    monkeypatch.setattr("builtins.input", ask)
    (trained / "own.py").write_text(f"open({str(trained / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (trained / "tokenizer_config.json").write_text(json.dumps(config))
    (trained / "config.json").write_text(json.dumps({"model_type": "nonsense", "auto_map": {"AutoConfig": "own.Own"}}))
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(trained)
    assert not (trained / "ran").exists()


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_pattern_that_takes_for_ever_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    save_tokenizer(tmp_path / "slow", tokenizer)
    with pytest.raises(UserError, match=r"fails on the text: .*retry-limit"):
        load_tokenizer(tmp_path / "slow").encode_batch(["a" * 60 + "b"])


def test_ids_beyond_the_number_of_entries_are_below_the_vocabulary(tmp_path: Path) -> None:
    """Else such a corpus would be written with too few bits."""
    save_tokenizer(tmp_path / "sparse", Tokenizer(models.BPE(vocab={"a": 0, "b": 70_000, "</s>": 5}, merges=[])))
    file = tmp_path / "sparse" / "tokenizer.json"
    values = json.loads(file.read_text())
    token = {"id": 5, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    values["added_tokens"] = [token | {"normalized": False, "special": True}]
    file.write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path / "sparse")
    assert tokenizer.encode_batch(["ab"]) == [[0, 70_000]]
    assert tokenizer.vocab_size == 70_001


def test_a_long_line_is_refused_by_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LINE_BYTES", 1 << 20)
    line = b'{"text": "' + b"a" * (1 << 20) + b'"}\n'
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\n' + line)
    pieces = read_samples(DataConfig(source="jsonl", path=str(tmp_path)))
    assert next(pieces).text == "first"
    with pytest.raises(UserError, match=r"a\.jsonl:2: a line of more than 1 MiB; split it"):
        next(pieces)


def test_a_long_line_of_text_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_format, "_PIECE_CHARS", 100)
    text = "a" * 1000 + "\nb"
    (tmp_path / "a.txt").write_text(text)
    pieces = [piece.text for piece in read_samples(DataConfig(source="text", path=str(tmp_path)))]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 200


def test_an_export_takes_no_file_from_outside_the_origin(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "notes.json").symlink_to(tmp_path / "secret")
    assert _copied_names(tmp_path, ()) == ["notes.json"]
    with pytest.raises(UserError, match="a symbolic link, which is not followed"):
        read_model_file(tmp_path, "notes.json", 100)
