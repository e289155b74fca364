"""Places off the machine: what names one, `s3://bucket/prefix`, `gs://bucket/prefix` or a folder, and how it is opened.

Credentials come from where the provider's own tools take them, the environment and their files, and are never in a
name, a recipe or a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, printable

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_SCHEMES = {"s3": "s3", "gs": "gcs", "file": "file"}
_PART = r"[A-Za-z0-9_][A-Za-z0-9._+@ -]{0,199}"
_PATH = re.compile(rf"{_PART}(/{_PART}){{0,7}}")
_MOST_CHARS = 900
"""Of a prefix: keys have at most 1,024 bytes, and a chunk's name comes behind it."""
PIECE_BYTES = 8 << 20
"""Of files that are no chunks: those that only grow keep their first pieces."""
_PARTS_IN_FLIGHT, _LARGE_BYTES = 2, 256 << 20


@dataclass(frozen=True, slots=True)
class Location:
    """Where state is stored off the machine."""

    driver: Literal["s3", "gcs", "file"]
    """tensorstore's kvstore driver."""
    bucket: str
    """Empty for a folder."""
    path: str
    """Prefix within the bucket, or the folder's absolute path; without a slash at its end."""

    def __str__(self) -> str:
        return f"{'s3' if self.driver == 's3' else 'gs'}://{self.bucket}/{self.path}" if self.bucket else self.path

    def parent(self) -> tuple[Location, str] | None:
        """The location around this one, and the last name of this one; None where there is none."""
        above, slash, name = self.path.rpartition("/")
        if not above.strip("/") or not slash:
            return None
        return Location(self.driver, self.bucket, above), name

    def spec(self, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """tensorstore's kvstore spec; what it has no field for comes from `environment`, this process's by default."""
        env = os.environ if environment is None else environment
        result: dict[str, Any] = {"driver": self.driver, "path": f"{self.path}/"}
        result |= {"bucket": self.bucket} if self.bucket else {}
        if self.driver != "s3":
            return result
        endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
        region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else None)
        if endpoint:
            result["endpoint"] = endpoint.rstrip("/")
        if region:
            result["aws_region"] = region
        return result | {"aws_credentials": aws_credentials(env)}


def aws_credentials(env: Mapping[str, str]) -> dict[str, Any]:
    """Where S3's credentials come from, in the order of the provider's own tools: tensorstore's own chain goes on as
    nobody where there are none."""
    if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        return {"type": "environment"}
    if env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return {"type": "default"}
    files = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    if env.get("AWS_PROFILE") or any(Path(env.get(name) or usual).expanduser().is_file() for name, usual in files):
        return {"type": "profile", "profile": env.get("AWS_PROFILE") or "default"}
    if env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        return {"type": "ecs"}
    if env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return {"type": "environment"}  # which says that there are none
    return {"type": "imds"}


def is_location(text: object) -> bool:
    """Whether `text` names a location by a scheme; a folder's name may be anything else's too."""
    return isinstance(text, str) and re.match(r"(?!hf://)[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def parse_location(text: str, field: str) -> Location:
    """The location that `text` names, a relative folder taken from the current one. UserError naming `field`."""
    said = one_line(text, 100)

    def wrong(why: str) -> UserError:
        return UserError(f"{field}: {why}")

    if printable(text) != text or "\n" in text or "\0" in text:
        raise wrong(f"'{said}' contains control characters; write s3://bucket/prefix, gs://... or a folder")
    scheme, separator, rest = text.partition("://")
    if not separator and not text.strip():
        raise wrong("the name is empty; write s3://bucket/prefix, gs://bucket/prefix or a folder")
    driver = _SCHEMES.get(scheme.lower()) if separator else None
    if separator and driver is None:
        raise wrong(f"'{said}' is not a supported location; write s3://, gs:// or a folder")
    if driver == "file" and not rest.startswith("/"):
        raise wrong(f"'{said}' names another machine; write file:///folder, or the folder itself")
    if driver is None or driver == "file":
        return _folder(rest if separator else text, field)
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or "?" in rest:
        what = f"{scheme}://... has more than a bucket and a prefix"
        raise wrong(f"{what}; put credentials and endpoints in the environment (docs/offsite.md)")
    if not _BUCKET.fullmatch(bucket):
        raise wrong(f"'{one_line(bucket, 60)}' in '{said}' is not a valid bucket name; correct it")
    prefix = prefix.strip("/")
    if not prefix:
        raise wrong(f"'{said}' has a bucket but no prefix; write {scheme}://{bucket}/a-name-for-this-run")
    if any(part in ("", ".", "..") for part in prefix.split("/")) or len(prefix) > _MOST_CHARS:
        raise wrong(f"the prefix of '{said}' has an empty part, '.' or '..', or is too long; correct it")
    return Location("s3" if driver == "s3" else "gcs", bucket, prefix)


def _folder(text: str, field: str) -> Location:
    try:
        folder = os.path.normpath(Path(text).expanduser().absolute())
    except (RuntimeError, OSError) as error:
        raise UserError(f"{field}: '{one_line(text, 100)}' is not a folder ({one_line(error)}); name another") from None
    if folder == "/":
        raise UserError(f"{field}: / is the root of this machine; name a folder on another disk")
    return Location("file", "", folder)


def require_mounted(location: Location, field: str) -> None:
    """UserError where the folder above `location` is not there: its disk is not mounted, or the name is wrong."""
    folder = Path(location.path)
    if location.driver == "file" and not folder.is_dir() and not folder.parent.is_dir():
        raise UserError(
            f"{field}: {folder.parent} does not exist: is the disk mounted? Mount it, or choose another folder"
        )


def mover_bytes(largest_file_bytes: int) -> int:
    """RAM of a process that moves chunk files of at most that size: itself, and its parts in flight, each of which is
    there as it was read, as it is sent, and twice as it comes back to be compared."""
    return (96 << 20) + 4 * parts_in_flight(largest_file_bytes) * largest_file_bytes


def parts_in_flight(largest_file_bytes: int) -> int:
    """Objects that one process moves at once."""
    return _PARTS_IN_FLIGHT if largest_file_bytes <= _LARGE_BYTES else 1


def may_be_named(name: str) -> bool:
    """Whether a file of a run directory, by its path within it, can be stored at a location."""
    return _PATH.fullmatch(name) is not None
