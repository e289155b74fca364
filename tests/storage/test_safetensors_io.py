import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from bad_model_files import damaged_headers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import sampled
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.storage.errors import UserError
from penstock.storage.safetensors_io import INDEX_NAME, CheckpointReader, CheckpointWriter

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHARD = "model-00001-of-00002.safetensors"
SHARD_BYTES = 968
BAD_INDEXES = ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def example(sizes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.rand(shape, generator=generator) * 100).to(DTYPES[i % len(DTYPES)])
        for i, (name, shape) in enumerate(sizes.items())
    }


def announce(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tensors = {f"w{i}": torch.full((10, 10), float(i)) for i in range(4)}
    folder = tmp_path / "model"
    with CheckpointWriter(folder, announce(tensors), max_shard_bytes=800) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return folder


@sampled(10, 40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=9),
    max_shard_bytes=st.integers(1, 5000),
    order=st.randoms(use_true_random=False),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], max_shard_bytes: int, order: object
) -> None:
    folder = tmp_path_factory.mktemp("st") / "model"
    tensors = example({f"layer.{i}": shape for i, shape in enumerate(shapes)})
    names = list(tensors)
    order.shuffle(names)  # type: ignore[attr-defined]
    with CheckpointWriter(folder, announce(tensors), max_shard_bytes) as writer:
        for name in names:
            writer.write(name, tensors[name])
    reader = CheckpointReader(folder)
    assert reader.tensors == {name: (dtype, shape) for name, dtype, shape in announce(tensors)}
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor)
    files = sorted(folder.glob("*.safetensors"))
    theirs = {name: (tensor, file) for file in files for name, tensor in load_file(file).items()}
    assert set(theirs) == set(tensors)
    for name, (tensor, file) in theirs.items():
        assert torch.equal(tensor, tensors[name])
        assert reader.file(name) == file
    if len(files) == 1:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    else:
        assert [path.name for path in files] == [
            f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
        ]
        index = json.loads((folder / INDEX_NAME).read_text())
        assert index["weight_map"] == {name: file.name for name, (_, file) in theirs.items()}
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = example({"a": (3, 5), "b": (7,), "c": (), "d": (0, 2), "e": (1, 1), "f": (2, 3), "g": (4,)})
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reader = CheckpointReader(tmp_path)
    for name, tensor in tensors.items():
        out = torch.zeros_like(tensor)
        reader.read_into(name, out)
        assert torch.equal(out, tensor)
        assert reader.tensors[name] == (name_of(tensor.dtype), tuple(tensor.shape))


def test_transformers_reads_and_writes_the_same(tmp_path: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / INDEX_NAME).exists()
    reader = CheckpointReader(tmp_path / "theirs")
    listed = [(name, dtype, shape) for name, (dtype, shape) in reader.tensors.items()]
    with CheckpointWriter(tmp_path / "ours", listed, max_shard_bytes=20_000) as writer:
        for name, _, _ in listed:
            writer.write(name, reader.read(name))
    config.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_reading_keeps_nothing_resident(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.ones(8 << 20) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    process = psutil.Process()
    reader = CheckpointReader(tmp_path)
    out = torch.zeros(8 << 20)
    before = process.memory_info().rss
    for name in reader.tensors:
        reader.read_into(name, out)
        assert out.min() == 1  # without temporaries, which the allocator might keep
    assert process.memory_info().rss - before < 20 << 20


# ---------------------------------------------------------------- bad input


def _ghost(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["ghost"] = SHARD
    (folder / INDEX_NAME).write_text(json.dumps(index))


def _cut(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / SHARD, size)


def _index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX_NAME).write_text(text)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / SHARD).unlink(), rf"1 of 2 shards are missing.*{SHARD}"),
    "a byte short": (
        _cut(SHARD_BYTES - 1),
        f"{SHARD}: truncated: expected {SHARD_BYTES} bytes, found {SHARD_BYTES - 1}",
    ),
    "longer": (_cut(SHARD_BYTES + 1), "longer than its header states"),
    "a ghost": (_ghost, rf"{SHARD}: tensor 'ghost'"),
    "no file": (lambda folder: [file.unlink() for file in folder.iterdir()], r"neither model\.safetensors nor"),
    **{f"{size} bytes": (_cut(size), rf"{SHARD}: truncated: expected .* found {size}") for size in (0, 7, 8, 50)},
    **{f"index {text}": (_index(text), rf"{INDEX_NAME}: not a readable index") for text in BAD_INDEXES},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model(sharded: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(sharded)
    with pytest.raises(UserError, match=message):
        CheckpointReader(sharded)


@pytest.mark.parametrize("name", [name for name in damaged_headers() if "tensors" not in name])
def test_a_damaged_header(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(damaged_headers()[name])
    with pytest.raises(UserError, match=r"model\.safetensors: (not a safetensors file|truncated|longer than)"):
        CheckpointReader(tmp_path)


# ---------------------------------------------------------------- writer


def test_names_appear_only_when_complete(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [("a", "float32", (2,)), ("b", "float32", (2,))])
    for bad in (torch.ones(3), torch.ones(2).double()):
        with pytest.raises(AssertionError):
            writer.write("a", bad)
    writer.write("a", torch.ones(2))
    assert list(tmp_path.glob("model*")) == []
    with pytest.raises(AssertionError, match="1 tensors were not written"):
        writer.close()
    writer.write("b", torch.ones(2))
    writer.close()
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path, [("a", "float32", (2,))]):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_refuses_a_folder_with_a_checkpoint(sharded: Path) -> None:
    with pytest.raises(UserError, match="already holds model-00001-of-00002"):
        CheckpointWriter(sharded, [("a", "float32", (2,))])


def test_disk_too_small(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the exported model needs 4,000,"):
        CheckpointWriter(tmp_path, [("a", "float32", (10**15,))])
    assert os.listdir(tmp_path) == []


def test_full_disk(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [("a", "float32", (2,))])
    path = tmp_path / ".model.safetensors.tmp"
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(UserError, match="8 bytes of tensor 'a' failed: No space left"):
        writer.write("a", torch.ones(2))
    writer.abort()
    assert os.listdir(tmp_path) == []


def test_non_contiguous_tensors_are_written_right(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    with CheckpointWriter(tmp_path, [("a", "float32", (4, 3))]) as writer:
        writer.write("a", tensor)
    assert torch.equal(CheckpointReader(tmp_path).read("a"), tensor)
