import json
import os
import shutil
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

from penstock.engine.hf.weights import _copied_names
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import has_model_file, is_plain_name, read_model_file
from penstock.storage.files.safetensors import INDEX_NAME, CheckpointReader, CheckpointWriter

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHARD = "model-00001-of-00002.safetensors"
BAD_INDEXES = ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']
BAD_SIZES = {967: "expected 968 bytes, found 967", **{n: f"expected .* found {n}" for n in (0, 7, 8, 50)}}


def example(sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.rand(shape, generator=generator) * 100 for name, shape in sizes.items()}
    return {name: value.to(DTYPES[i % len(DTYPES)]) for i, (name, value) in enumerate(values.items())}


def announce(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]


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
    (folder / "theirs").mkdir()
    save_file(tensors, folder / "theirs/model.safetensors", {"format": "pt"})
    for reader in (CheckpointReader(folder / "theirs"), CheckpointReader(folder)):
        assert reader.tensors == {name: (dtype, shape) for name, dtype, shape in announce(tensors)}
        for name, tensor in tensors.items():
            reader.read_into(name, out := torch.zeros_like(tensor))
            assert torch.equal(out, tensor)
            assert torch.equal(reader.read(name), tensor)
    shutil.rmtree(folder / "theirs")
    files = sorted(folder.glob("*.safetensors"))
    theirs = {name: (tensor, file) for file in files for name, tensor in load_file(file).items()}
    assert set(theirs) == set(tensors)
    for name, (tensor, file) in theirs.items():
        assert torch.equal(tensor, tensors[name])
        assert reader.file(name) == file
    if len(files) == 1:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    else:
        numbers = range(1, len(files) + 1)
        assert [path.name for path in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in numbers]
        index = json.loads((folder / INDEX_NAME).read_text())
        assert index["weight_map"] == {name: file.name for name, (_, file) in theirs.items()}
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_reads_and_writes_the_same(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / INDEX_NAME).exists()
    reader = CheckpointReader(tmp_path / "theirs")
    listed = [(name, dtype, shape) for name, (dtype, shape) in reader.tensors.items()]
    with CheckpointWriter(tmp_path / "ours", listed, max_shard_bytes=20_000) as writer:
        for name, _, _ in listed:
            writer.write(name, reader.read(name))
    model.config.save_pretrained(tmp_path / "ours")
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


BAD_SHARDS = {n: rf"{SHARD}: truncated: {found}" for n, found in BAD_SIZES.items()} | {969: "longer than its header"}
BAD_MAPS = {text: rf"{INDEX_NAME}: not a readable index" for text in BAD_INDEXES}
BAD_MAPS[json.dumps({"weight_map": {"ghost": SHARD}})] = rf"{SHARD}: tensor 'ghost'"


def test_a_damaged_model(sharded: Path) -> None:
    shard, index = sharded / SHARD, sharded / INDEX_NAME
    whole, said = shard.read_bytes(), index.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            CheckpointReader(sharded)

    assert len(whole) == 968
    for size, message in BAD_SHARDS.items():
        shard.write_bytes(whole)
        os.truncate(shard, size)
        refused(message)
    shard.write_bytes(whole)
    for text, message in BAD_MAPS.items():
        index.write_text(text)
        refused(message)
    index.write_bytes(said)
    shard.unlink()
    refused(rf"1 of 2 shards are missing.*{SHARD}")
    for file in sharded.iterdir():
        file.unlink()
    refused(r"neither model\.safetensors nor")


@pytest.mark.parametrize("name", [name for name in damaged_headers() if "tensors" not in name])
def test_a_damaged_header(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(damaged_headers()[name])
    with pytest.raises(UserError, match=r"model\.safetensors: (not a safetensors file|truncated|longer than)"):
        CheckpointReader(tmp_path)


def test_names_appear_only_when_complete(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [("a", "float32", (2, 3)), ("b", "float32", (2,))])
    for bad in (torch.ones(3, 2), torch.ones(2, 3).double()):
        with pytest.raises(AssertionError):
            writer.write("a", bad)
    turned = torch.arange(6.0).reshape(3, 2).T
    writer.write("a", turned)
    assert list(tmp_path.glob("model*")) == []
    with pytest.raises(AssertionError, match="1 tensors were not written"):
        writer.close()
    writer.write("b", torch.ones(2))
    writer.close()
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert torch.equal(CheckpointReader(tmp_path).read("a"), turned)


def test_failed_export_leaves_nothing(tmp_path: Path, sharded: Path) -> None:
    empty, announced = tmp_path / "empty", [("a", "float32", (2,))]
    with pytest.raises(RuntimeError), CheckpointWriter(empty, announced):
        raise RuntimeError
    with pytest.raises(UserError, match="the exported model needs 4,000,"):
        CheckpointWriter(empty, [("a", "float32", (10**15,))])
    assert os.listdir(empty) == []
    with pytest.raises(UserError, match="already holds model-00001-of-00002"):
        CheckpointWriter(sharded, announced)
    writer = CheckpointWriter(empty, announced)
    (empty / ".model.safetensors.tmp").unlink()
    (empty / ".model.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match="8 bytes of tensor 'a' failed: No space left"):
        writer.write("a", torch.ones(2))
    writer.abort()
    assert os.listdir(empty) == []


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(8))
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The folder of a model's files as huggingface_hub keeps them."""
    model = tmp_path / "hub" / "models--owner--name"
    snapshot = model / "snapshots" / ("ab" * 20)
    (model / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "blobs" / DIGEST).write_bytes(WEIGHTS)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{DIGEST}")
    return snapshot


def test_the_hub_s_cache_is_read_through_its_links(tmp_path: Path, snapshot: Path) -> None:
    (tmp_path / "mine").symlink_to(snapshot)  # a link of the user's, to the folder
    for folder in (snapshot, tmp_path / "mine"):
        assert CheckpointReader(folder).read("a").numel() == 2
        assert read_model_file(folder, "model.safetensors", 1 << 20) == WEIGHTS
    (entry := snapshot.parents[1]).rename(tmp_path / "name")  # elsewhere the same are not followed
    with pytest.raises(UserError, match=r"a symbolic link to .*, which is outside of the folder"):
        CheckpointReader(tmp_path / "name" / snapshot.relative_to(entry))


@pytest.mark.parametrize(
    "target",
    [
        "/etc/hostname",
        "../../../models--other--name/blobs/" + DIGEST,
        "../../../../outside",
        "../../blobs/../../../outside",
        "../../blobs/name",
        "../../refs/main",
        "../../blobs/" + DIGEST[::-1],
    ],
)
def test_no_other_link_of_the_cache_is_followed(tmp_path: Path, snapshot: Path, target: str) -> None:
    (tmp_path / "outside").write_bytes(WEIGHTS)
    (snapshot.parents[1] / "blobs" / DIGEST[::-1]).symlink_to(tmp_path / "outside")  # a blob that is a link
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(target)
    with pytest.raises(UserError, match=r"model\.safetensors: it is a symbolic link to .*, which (is out|does not)"):
        CheckpointReader(snapshot)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    reader = CheckpointReader(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "moved")
    (tmp_path / "model.safetensors").symlink_to("/etc/hostname")  # while it is read
    with pytest.raises(UserError, match="a symbolic link to /etc/hostname, which is outside of the folder"):
        reader.read("a")
    (tmp_path / "notes.json").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe", "folder.json"):
        assert has_model_file(tmp_path, name)
        with pytest.raises(UserError, match="no regular file"):
            read_model_file(tmp_path, name, 10)
    with pytest.raises(UserError, match="larger than the limit of 7 bytes"):
        read_model_file(tmp_path, "moved", 7)
    assert _copied_names(tmp_path) == ["notes.json"], "an export refuses it, and takes no folder along"
    with pytest.raises(UserError, match="a symbolic link to /etc/hostname, which is outside of the folder"):
        read_model_file(tmp_path, "notes.json", 100)
    assert is_plain_name("model-00001-of-00002.safetensors")
    for name in ("", ".", "..", "a/b", "/a", "../a", "a\0", "a" * 256, 5, None, ["a"]):
        assert not is_plain_name(name)
