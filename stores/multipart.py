"""Large files sent to S3 in parts: an upload that was interrupted goes on after the parts that arrived.

Objects are named by their content, so parts that lie there under the name of an object, whoever sent
them, are parts of that very content.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PART = 1 << 26  # bytes
MOST_PARTS = 10_000  # S3 takes no more
AT_ONCE = 4


def upload(fs: Any, file: Path, path: str) -> None:
    """Send a file of more than one part; OSError when the line breaks: call again to continue."""
    bucket, key, _ = fs.split_path(path)
    where = {"Bucket": bucket, "Key": key}
    size = file.stat().st_size
    length = max(PART, -(-size // MOST_PARTS))
    begun = [one["UploadId"] for one in pending(fs, path) if one["Key"] == key]
    where["UploadId"] = begun[0] if begun else fs.call_s3("create_multipart_upload", **where)["UploadId"]
    there = {part["PartNumber"]: part for part in _parts(fs, where)} if begun else {}

    def send(number: int) -> dict[str, Any]:
        start = (number - 1) * length
        count = min(length, size - start)
        tag = there[number]["ETag"] if there.get(number, {}).get("Size") == count else None
        if tag is None:
            with file.open("rb") as data:
                body = os.pread(data.fileno(), count, start)
            tag = fs.call_s3("upload_part", **where, PartNumber=number, Body=body)["ETag"]
        return {"PartNumber": number, "ETag": tag}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = list(pool.map(send, range(1, -(-size // length) + 1)))
    fs.call_s3("complete_multipart_upload", **where, MultipartUpload={"Parts": parts})


def pending(fs: Any, path: str) -> list[dict[str, Any]]:
    """The uploads below a path that were begun and not completed."""
    bucket, key, _ = fs.split_path(path)
    with contextlib.suppress(OSError, NotImplementedError):  # some may not list them: begin anew then
        return list(fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", ()))
    return []


def held(fs: Any, path: str, begun: dict[str, Any]) -> tuple[int, float]:
    """Bytes that a pending upload has so far, and when the last of them came by the server's clock."""
    bucket, _, _ = fs.split_path(path)
    where = {"Bucket": bucket, "Key": begun["Key"], "UploadId": begun["UploadId"]}
    parts = list(_parts(fs, where))
    times = [part["LastModified"] for part in parts] or [begun["Initiated"]]
    return sum(part["Size"] for part in parts), max(times).timestamp()


def abort(fs: Any, path: str, begun: dict[str, Any]) -> None:
    """Throw away what a pending upload has."""
    bucket, _, _ = fs.split_path(path)
    fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=begun["Key"], UploadId=begun["UploadId"])


def _parts(fs: Any, where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    after = 0
    while True:
        page = fs.call_s3("list_parts", **where, PartNumberMarker=after)
        yield from page.get("Parts", ())
        if not page.get("IsTruncated"):
            return
        after = page["NextPartNumberMarker"]
