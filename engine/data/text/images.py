"""Images by the model's own processor: how many tokens stand for each, and what the vision tower is given of it."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.engine.data.samples import ImageFile, RowError
from penstock.engine.data.text.chat import Rendered
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import has_model_file, read_model_file
from penstock.storage.files.untrusted import one_line, parse_object, printable, read_regular, real_path

FILES = ("processor_config.json", "preprocessor_config.json")
"""Of a model folder: what its processor does with images."""
_KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_BYTES = 1 << 28
"""Of an image's file."""
_MOST_CONFIG_BYTES = 1 << 24


class ImageProcessor:
    """The image part of a model folder's processor, on the CPU and by Pillow, so that every machine makes the same of
    an image. It can be pickled.

    Attributes: `fingerprint` (hex, equal where the folder's files about it are).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        contents = [read_model_file(folder, name, _MOST_CONFIG_BYTES) for name in FILES if has_model_file(folder, name)]
        self.fingerprint = hashlib.sha256(b"".join(contents)).hexdigest()

    @classmethod
    def find(cls, folder: Path | None) -> ImageProcessor | None:
        """Of a model folder; None where it has no processor of images."""
        return cls(folder) if folder is not None and any(has_model_file(folder, name) for name in FILES) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @cached_property
    def _processor(self) -> Any:
        """transformers' own, without the video part, which would take the package torchvision."""
        _require_pillow()
        from transformers import AutoImageProcessor, AutoTokenizer  # they take seconds, as torch does
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

        from penstock.engine.model.images import require_images

        kind = str(parse_object(read_model_file(self.folder, "config.json", _MOST_CONFIG_BYTES)).get("model_type"))
        require_images(kind)
        try:
            own: Any = processor_class_from_name(PROCESSOR_MAPPING_NAMES[kind])
            attributes = ["image_processor", "tokenizer"]
            made: Any = type(own.__name__, (own,), {"get_attributes": classmethod(lambda cls: attributes)})
            local = {"local_files_only": True, "trust_remote_code": False}
            images = AutoImageProcessor.from_pretrained(self.folder, backend="pil", **local)
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **local)
            config, _ = own.get_processor_dict(self.folder, local_files_only=True)
            config = {name: value for name, value in config.items() if not name.endswith("_processor")}
            return made.from_args_and_dict([images, tokenizer], config)
        except Exception as error:  # of any type, as files may hold anything
            raise UserError(f"{self.folder}: its processor of images cannot be read: {one_line(error)}") from error

    @cached_property
    def _options(self) -> dict[str, Any]:
        processor = self._processor
        merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt")
        options: dict[str, Any] = merged["images_kwargs"]
        return options

    @property
    def token_id(self) -> int:
        """The token of which as many stand for an image as the text model gets vectors for it."""
        return int(self._processor.image_token_ids[0])

    def process(self, content: bytes) -> tuple[dict[str, Any], str]:
        """Of an image's file: tensors by the names of the model's arguments, and the text that stands for it.

        Raises ValueError saying what is wrong with it.
        """
        try:
            made, (text,) = self._processor._process_images([decoded(content)], **self._options)
        except (UserError, ValueError):
            raise
        except Exception as error:
            raise ValueError(f"the model's processor cannot use it: {one_line(error, 200)}") from error
        unused = self._processor.unused_input_names
        return {name: value for name, value in made.items() if name not in unused}, str(text)

    def expand(self, one: Rendered, images: Sequence[str | bytes], where: str) -> Rendered:
        """A conversation with its images, and what stands for them in its text. RowError where an image cannot be read,
        or the template shows another number of them."""
        found = [*re.finditer(re.escape(self._processor.image_token), one.text)]
        if len(found) != len(images):
            raise RowError(
                f"{where}: the chat template shows {len(found)} images, and the conversation has {len(images)}; use "
                f"the model's own template, and no '{one_line(self._processor.image_token, 40)}' in a text"
            )
        contents, texts = [], []
        for number, image in enumerate(images, 1):
            try:
                contents.append(read_image(image))
                texts.append(self.process(contents[-1])[1])
            except ValueError as error:
                name = f"image {number}" if isinstance(image, bytes) else f"image {printable(image)}"
                raise RowError(f"{where}: {name}: {error}; correct it, or leave the row out") from error
        parts, ends, moved = [], [0], [0]
        for match, text in zip(found, texts, strict=True):
            parts += [one.text[ends[-1] : match.start()], text]
            ends.append(match.end())
            moved.append(moved[-1] + len(text) - (match.end() - match.start()))
        whole = "".join([*parts, one.text[ends[-1] :]])

        def place(at: int) -> int:
            return at + moved[sum(end <= at for end in ends[1:])]

        spans = None
        if one.spans is not None:
            spans = [span._replace(start=place(span.start), stop=place(span.stop)) for span in one.spans]
        token = self._processor.tokenizer.convert_ids_to_tokens(self.token_id)
        files = (ImageFile(content, text.count(token)) for content, text in zip(contents, texts, strict=True))
        return one._replace(text=whole, spans=spans, images=tuple(files))


def _require_pillow() -> None:
    """UserError where the package that reads images is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError(
            "images in the data are read by the package Pillow, which is not installed; install it with "
            "`pip install 'penstock[images]'`"
        ) from None


def decoded(content: bytes) -> Any:
    """A PIL image in RGB of a file's content. ValueError for what is none, or broken."""
    import PIL.Image
    import PIL.ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            with PIL.Image.open(io.BytesIO(content), formats=_KINDS) as image:
                return PIL.ImageOps.exif_transpose(image).convert("RGB")
    except PIL.UnidentifiedImageError:
        raise ValueError(f"not an image of a known format ({', '.join(_KINDS)})") from None
    except Exception as error:  # of any type, by what is broken
        raise ValueError(f"not a whole image: {one_line(error, 200)}") from error


def read_image(image: str | bytes) -> bytes:
    """The content of an image's file, given as its path or as it is. ValueError saying what is wrong with it."""
    if isinstance(image, bytes):
        return image
    try:
        return read_regular(real_path(Path(image)), most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise ValueError(
            "it does not exist; paths of images are relative to the folder of the file that names them"
        ) from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from error
